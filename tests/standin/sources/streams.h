// Streams that run late: one worker thread and one queue each; events are marks in a queue.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace standin {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto DEVICE_TYPE = c10::DeviceType::CUDA;
constexpr auto DEVICE_KEY = c10::DispatchKey::CUDA;
constexpr int DEVICES = 2;
constexpr size_t MOST_PENDING = 2048;  // as in a launch queue: above it the oldest runs
using Lock = std::unique_lock<std::mutex>;

// Late streams run only what a wait requires, so that every missing wait shows.
inline std::atomic<bool> default_late{false};  // the default streams
inline std::atomic<bool> others_late{false};   // all others
inline std::atomic<int64_t> delay_us{0};      // otherwise: sleep so long before every kernel
inline std::atomic<bool> poison{true};
// A virtual clock, which is on if `bytes_per_us` is not 0: each stream has a time, which kernels and
// copies advance by what their bytes and products would take, and which waits bring to the time of
// the event. Events then tell this time. The host takes none.
inline std::atomic<double> bytes_per_us{0}, flops_per_us{0}, copied_bytes_per_us{0};
inline std::atomic<int64_t> queued{0}, at_once{0}, strides_differ{0};
inline int64_t overridden = 0;
inline std::mutex names_mutex;
inline std::map<std::string, int64_t> at_once_names;
// Calls of the device's functions since the last look, by function.
struct Asked {
  std::atomic<int64_t> stream{0}, capturing{0}, event_record{0}, event_query{0}, event_wait{0}, stats{0}, generator{0}, record_stream{0};
};
inline Asked asked;
inline std::mutex error_mutex;
inline std::string first_error;

struct Queue {
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::pair<int64_t, std::function<void()>>> tasks;
  int64_t pushed = 0, done = 0, wanted = 0;
  std::atomic<double> us{0};  // the virtual time; only tasks of the queue change it
  int device = 0;
  const bool is_default;
  Queue(int d, bool first) : device(d), is_default(first) { std::thread([this] { work(); }).detach(); }
  int64_t push(std::function<void()> fn) {
    Lock l(m);
    tasks.emplace_back(++pushed, std::move(fn));
    if (tasks.size() > MOST_PENDING) wanted = std::max(wanted, pushed - (int64_t)MOST_PENDING / 2);
    cv.notify_all();
    return pushed;
  }
  void wait_for(int64_t seq) {
    Lock l(m);
    wanted = std::max(wanted, seq);
    cv.notify_all();
    cv.wait(l, [&] { return done >= seq; });
  }
  void drain() { Lock l(m); auto s = pushed; l.unlock(); wait_for(s); }
  bool idle() { Lock l(m); return done == pushed; }
  bool late() const { return is_default ? default_late : others_late; }
  void poke() { Lock l(m); cv.notify_all(); }
  void work() {
    for (;;) {
      std::function<void()> fn;
      int64_t seq;
      {
        Lock l(m);
        cv.wait(l, [&] { return !tasks.empty() && (!late() || tasks.front().first <= wanted); });
        seq = tasks.front().first;
        fn = std::move(tasks.front().second);
        tasks.pop_front();
      }
      try {
        at::init_num_threads();
        fn();
      } catch (const std::exception& e) {
        Lock l(error_mutex);
        if (first_error.empty()) first_error = e.what();
      }
      fn = nullptr;
      Lock l(m);
      done = seq;
      cv.notify_all();
    }
  }
};

inline std::mutex streams_mutex;
inline std::vector<Queue*> streams[DEVICES];
inline thread_local DeviceIndex this_device = 0;
inline thread_local int64_t current_stream[DEVICES] = {};

inline int index_of(Device d) { return d.index() < 0 ? this_device : d.index(); }
inline Queue* queue_of(int d, int64_t id) {
  Lock l(streams_mutex);
  if (streams[d].empty()) streams[d].push_back(new Queue(d, true));
  return streams[d].at(id);
}
inline Queue* queue_of(const Stream& s) { return queue_of(index_of(s.device()), s.id()); }
inline Queue* now_on(int d) { return queue_of(d, current_stream[d]); }
inline std::vector<Queue*> all_on(int d) { queue_of(d, 0); Lock l(streams_mutex); return streams[d]; }
inline void raise_errors() {
  Lock l(error_mutex);
  if (first_error.empty()) return;
  auto e = std::move(first_error);
  first_error.clear();
  TORCH_CHECK(false, "standin device: a queued kernel failed: ", e);
}
inline void drain_device(int d) { for (auto* q : all_on(d)) q->drain(); }

struct Mark {  // one recording of an event in a queue
  std::mutex m;
  std::condition_variable cv;
  bool set = false;
  double ms = 0, us = 0;
  bool synchronized = false;  // the host has waited for it
  Queue* queue = nullptr;
  int64_t seq = 0;
  bool query() { Lock l(m); return set; }
  void wait() {
    { Lock l(queue->m); queue->wanted = std::max(queue->wanted, seq); queue->cv.notify_all(); }
    Lock l(m);
    cv.wait(l, [&] { return set; });
  }
};
inline std::shared_ptr<Mark> mark_on(Queue* q) {
  auto mark = std::make_shared<Mark>();
  mark->queue = q;
  mark->seq = INT64_MAX;
  mark->seq = q->push([mark] {
    Lock l(mark->m);
    mark->us = mark->queue->us;
    mark->ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    mark->set = true;
    mark->cv.notify_all();
  });
  return mark;
}
struct Event { std::shared_ptr<Mark> mark; };

}  // namespace standin
