// The interface that PyTorch needs of a device: current device and stream, events, hooks.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "random.h"

namespace standin {

inline std::atomic<int64_t> failing_query = 0;  // n: the n-th query of an event fails; 0: none

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  Device exchangeDevice(Device d) const override { Device old(DEVICE_TYPE, this_device); setDevice(d); return old; }
  Device getDevice() const override { return {DEVICE_TYPE, this_device}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "no such device");
    if (d.index() >= 0) this_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) this_device = d.index(); }
  static Stream stream(int d, int64_t id) { return Stream(Stream::UNSAFE, Device(DEVICE_TYPE, d), id); }
  Stream getStream(Device d) const override { asked.stream++; return stream(index_of(d), current_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(index_of(d), 0); }
  Stream getNewStream(Device d, int = 0) const override {
    int i = index_of(d);
    queue_of(i, 0);
    Lock l(streams_mutex);
    streams[i].push_back(new Queue(i, false));
    return stream(i, streams[i].size() - 1);
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    current_stream[index_of(s.device())] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return queue_of(s); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    asked.event_record++;
    if (!*e) *e = new Event;
    static_cast<Event*>(*e)->mark = mark_on(queue_of(s));
  }
  void block(void* e, const Stream& s) const override {
    asked.event_wait++;
    if (!e) return;
    auto mark = static_cast<Event*>(e)->mark;
    auto* q = queue_of(s);
    TORCH_CHECK(!capturing || mark->queue == q, "a stream waits for another while a graph is captured");
    if (mark->queue != q) q->push([mark, q] { mark->wait(); q->us = std::max(q->us.load(), mark->us); });
  }
  bool queryEvent(void* e) const override {
    asked.event_query++;
    TORCH_CHECK(failing_query == 0 || --failing_query != 0, "standin device: unspecified launch failure");
    if (!e) return true;
    auto& mark = static_cast<Event*>(e)->mark;
    // By the virtual clock, what other streams did later than the default stream's time is not over.
    return mark->query() && (bytes_per_us == 0 || mark->synchronized || mark->us <= queue_of(mark->queue->device, 0)->us);
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  bool isStreamCapturing(const Stream&) const override { asked.capturing++; return capturing; }
  bool queryStream(const Stream& s) const override { return queue_of(s)->idle(); }
  void synchronizeStream(const Stream& s) const override { queue_of(s)->drain(); raise_errors(); }
  void synchronizeEvent(void* e) const override { if (e) { auto& mark = static_cast<Event*>(e)->mark; mark->wait(); mark->synchronized = true; raise_errors(); } }
  void synchronizeDevice(const DeviceIndex d) const override { drain_device(d < 0 ? this_device : d); raise_errors(); }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override { memory().recordStream(p, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto &x = static_cast<Event*>(a)->mark, &y = static_cast<Event*>(b)->mark;
    TORCH_CHECK(x->query() && y->query(), "both events must have happened");
    return bytes_per_us != 0 ? (y->us - x->us) / 1000 : y->ms - x->ms;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CudaHooks final : at::CUDAHooksInterface {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return this_device; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? this_device : d); }
  Device getDeviceFromPtr(void* p) const override { return {DEVICE_TYPE, (DeviceIndex)memory().live.at(p)->device}; }
  bool isPinnedPtr(const void* p) const override { return pinned().holds(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { this_device = d; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(this_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? this_device : std::exchange(this_device, d); }
};
inline void resize_bytes(c10::StorageImpl* s, size_t n) {
  auto fresh = memory().allocate_on(n, index_of(s->device()));
  size_t keep = std::min(n, s->nbytes());
  if (keep) now_on(index_of(s->device()))->push([to = fresh.get(), from = s->data(), keep] { memcpy(to, from, keep); });
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}

}  // namespace standin
