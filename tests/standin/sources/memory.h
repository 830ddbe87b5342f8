// The device's caching allocator, and page-locked host memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "streams.h"

namespace standin {

using c10::DataPtr;

constexpr size_t SMALL = 1 << 20;
constexpr size_t SMALL_SEGMENT = 2 << 20;
constexpr size_t LARGE_SEGMENT = 20 << 20;
constexpr size_t LEAST_LARGE = 10 << 20;
struct Block {
  char* ptr;
  size_t size;
  int device;
  Queue* queue;      // the stream whose pool has it
  bool small, used = false;
  Block *before = nullptr, *after = nullptr;
  std::set<Queue*> others;  // other streams that use it (record_stream)
  size_t requested = 0;      // the bytes that were asked for
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return a->size != b->size ? a->size < b->size : a->ptr < b->ptr; }
};
using Stats = c10::CachingDeviceAllocator::DeviceStats;

struct Allocator final : c10::DeviceAllocator {
  std::recursive_mutex m;
  std::map<std::pair<Queue*, bool>, std::set<Block*, BySize>> pools;
  std::unordered_map<void*, Block*> live;
  std::vector<std::pair<Block*, std::vector<std::shared_ptr<Mark>>>> pending;
  Stats stats[DEVICES];
  size_t limit[DEVICES] = {size_t(4) << 30, size_t(4) << 30};
  size_t most[DEVICES] = {SIZE_MAX, SIZE_MAX};  // limit of allocated bytes; above it allocations fail
  int64_t refusals = 0;                         // number of allocations that may still fail
  std::string refusal;                          // the message then; empty: that of an allocator

  static void change(c10::CachingAllocator::StatArray& s, bool small, int64_t by) {
    for (size_t i : {size_t(0), small ? size_t(1) : size_t(2)})
      by >= 0 ? s[i].increase(by) : s[i].decrease(-by);
  }
  Block* take(Queue* q, bool small, size_t size) {
    auto& pool = pools[{q, small}];
    Block key{nullptr, size, 0, q, small};
    auto it = pool.lower_bound(&key);
    if (it == pool.end()) return nullptr;
    auto* b = *it;
    pool.erase(it);
    return b;
  }
  Block* segment(int d, Queue* q, bool small, size_t size) {
    size_t whole = small ? SMALL_SEGMENT : size < LEAST_LARGE ? LARGE_SEGMENT : (size + SMALL_SEGMENT - 1) / SMALL_SEGMENT * SMALL_SEGMENT;
    if (size_t(stats[d].reserved_bytes[0].current) + whole > limit[d]) return nullptr;
    void* p = nullptr;
    if (posix_memalign(&p, 4096, whole)) return nullptr;
    if (poison) memset(p, 0xFF, whole);
    stats[d].num_device_alloc++;
    change(stats[d].segment, small, 1);
    change(stats[d].reserved_bytes, small, whole);
    return new Block{static_cast<char*>(p), whole, d, q, small};
  }
  [[noreturn]] void refuse(int d, size_t size) {
    stats[d].num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "standin device out of memory. Tried to allocate ", size, " bytes");
    abort();
  }
  void* get(size_t n, int d, Queue* q) {
    std::lock_guard l(m);
    collect(false);
    size_t size = std::max<size_t>(512, (n + 511) / 512 * 512);
    if (refusals > 0 && size_t(stats[d].allocated_bytes[0].current) + size > most[d]) {
      refusals--;
      TORCH_CHECK(refusal.empty(), refusal);
      refuse(d, size);
    }
    bool small = size <= SMALL;
    Block* b = take(q, small, size);
    if (!b) b = segment(d, q, small, size);
    if (!b) {  // free the cache, then try once more
      stats[d].num_alloc_retries++;
      drain_device(d);
      collect(true);
      emptyCache();
      b = segment(d, q, small, size);
    }
    if (!b) refuse(d, size);
    size_t rest = b->size - size;
    if (small ? rest >= 512 : rest > SMALL) {
      auto* tail = new Block{b->ptr + size, rest, d, q, small};
      tail->before = b; tail->after = b->after;
      if (b->after) b->after->before = tail;
      b->after = tail; b->size = size;
      pools[{q, small}].insert(tail);
    }
    b->used = true;
    live[b->ptr] = b;
    auto& s = stats[d];
    change(s.allocation, small, 1); change(s.active, small, 1);
    change(s.allocated_bytes, small, b->size); change(s.active_bytes, small, b->size);
    change(s.requested_bytes, small, n);
    b->requested = n;
    return b->ptr;
  }
  void put(void* p) {
    std::lock_guard l(m);
    auto* b = live.at(p);
    live.erase(p);
    auto& s = stats[b->device];
    change(s.allocation, b->small, -1);
    change(s.allocated_bytes, b->small, -(int64_t)b->size);
    change(s.requested_bytes, b->small, -(int64_t)b->requested);
    if (b->others.empty()) return give(b);
    std::vector<std::shared_ptr<Mark>> marks;
    for (auto* q : b->others) marks.push_back(mark_on(q));
    b->others.clear();
    pending.emplace_back(b, std::move(marks));
  }
  void give(Block* b) {
    auto& s = stats[b->device];
    change(s.active, b->small, -1);
    change(s.active_bytes, b->small, -(int64_t)b->size);
    if (poison) b->queue->push([p = b->ptr, n = b->size] { memset(p, 0xFF, n); });
    b->used = false;
    auto& pool = pools[{b->queue, b->small}];
    auto join = [&](Block* x, Block* y) {  // y directly follows x
      x->size += y->size; x->after = y->after;
      if (y->after) y->after->before = x;
      delete y;
    };
    auto idle = [&](Block* x) { return x && pool.count(x); };
    if (idle(b->after)) { pool.erase(b->after); join(b, b->after); }
    if (idle(b->before)) { auto* x = b->before; pool.erase(x); join(x, b); b = x; }
    pool.insert(b);
  }
  void collect(bool wait) {
    for (size_t i = 0; i < pending.size();) {
      bool over = true;
      for (auto& mark : pending[i].second) { if (wait) mark->wait(); over &= mark->query(); }
      if (over) { auto* b = pending[i].first; pending.erase(pending.begin() + i); give(b); } else i++;
    }
  }
  // c10::Allocator
  DataPtr allocate(size_t n) override { return allocate_on(n, this_device); }
  DataPtr allocate_on(size_t n, int d) {
    if (!n) return {nullptr, nullptr, &no_delete, Device(DEVICE_TYPE, d)};
    void* p = get(n, d, now_on(d));
    return {p, p, raw_deleter(), Device(DEVICE_TYPE, d)};
  }
  static void no_delete(void*) {}
  static void delete_(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &delete_; }
  void copy_data(void* to, const void* from, size_t n) const override {
    now_on(this_device)->push([=] { memcpy(to, from, n); });
  }
  // c10::DeviceAllocator
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard l(m);
    for (int d = 0; d < DEVICES; d++) drain_device(d);
    collect(true);
    for (int d = 0; d < DEVICES; d++) drain_device(d);
    for (auto& [key, pool] : pools)
      for (auto it = pool.begin(); it != pool.end();) {
        auto* b = *it;
        if (b->before || b->after) { ++it; continue; }
        it = pool.erase(it);
        auto& s = stats[b->device];
        s.num_device_free++;
        change(s.segment, b->small, -1);
        change(s.reserved_bytes, b->small, -(int64_t)b->size);
        free(b->ptr);
        delete b;
      }
  }
  void recordStream(const DataPtr& p, Stream s) override {
    asked.record_stream++;
    if (p.get_deleter() != &delete_) return;  // foreign memory, which CUDA's allocator skips too
    std::lock_guard l(m);
    auto it = live.find(p.get());
    if (it != live.end() && it->second->queue != queue_of(s)) it->second->others.insert(queue_of(s));
  }
  using Piece = std::tuple<uintptr_t, size_t, bool>;  // address, bytes, and if it is allocated
  std::vector<std::vector<Piece>> segments(int d) {
    std::lock_guard l(m);
    std::set<Block*> known;
    for (auto& [p, b] : live) known.insert(b);
    for (auto& [b, marks] : pending) known.insert(b);
    for (auto& [key, pool] : pools) known.insert(pool.begin(), pool.end());
    std::vector<std::vector<Piece>> found;
    for (auto* first : known) {
      if (first->device != d || first->before) continue;
      found.emplace_back();
      for (auto* b = first; b; b = b->after) found.back().emplace_back((uintptr_t)b->ptr, b->size, b->used);
    }
    return found;
  }
  Stats getDeviceStats(DeviceIndex d) override { asked.stats++; std::lock_guard l(m); return stats[d]; }
  template <class F> void each(DeviceIndex d, F f) {
    std::lock_guard l(m);
    auto& s = stats[d];
    for (auto* a : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                    &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& x : *a) f(x);
  }
  void resetAccumulatedStats(DeviceIndex d) override { each(d, [](auto& x) { x.reset_accumulated(); }); }
  void resetPeakStats(DeviceIndex d) override { each(d, [](auto& x) { x.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    return {limit[d] - stats[d].reserved_bytes[0].current, limit[d]};
  }
};
inline Allocator& memory() { static auto* a = new Allocator; return *a; }
inline void Allocator::delete_(void* p) { memory().put(p); }

struct Pinned final : c10::Allocator {  // reuses a block only after its queued copies
  std::mutex m;
  std::map<char*, std::pair<size_t, std::vector<std::shared_ptr<Mark>>>> live;
  std::vector<std::pair<std::vector<std::shared_ptr<Mark>>, char*>> pending;
  DataPtr allocate(size_t n) override;
  static void delete_(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &delete_; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  decltype(live)::iterator find(const void* p) {
    auto it = live.upper_bound((char*)p);
    if (it == live.begin()) return live.end();
    --it;
    return (char*)p < it->first + it->second.first ? it : live.end();
  }
  bool holds(const void* p) { Lock l(m); return find(p) != live.end(); }
  void used(const void* p, std::shared_ptr<Mark> mark) { Lock l(m); auto it = find(p); if (it != live.end()) it->second.second.push_back(mark); }
};
inline Pinned& pinned() { static auto* a = new Pinned; return *a; }
inline DataPtr Pinned::allocate(size_t n) {
  void* p = nullptr;
  if (posix_memalign(&p, 4096, std::max<size_t>(n, 64))) TORCH_CHECK(false, "out of pinned memory");
  Lock l(m);
  live[(char*)p] = {std::max<size_t>(n, 64), {}};
  return {p, p, &delete_, Device(c10::DeviceType::CPU)};
}
inline void Pinned::delete_(void* p) {
  auto& me = pinned();
  Lock l(me.m);
  auto it = me.live.find((char*)p);
  me.pending.emplace_back(std::move(it->second.second), it->first);
  me.live.erase(it);
  for (size_t i = 0; i < me.pending.size();) {
    bool over = true;
    for (auto& mark : me.pending[i].first) over &= mark->query();
    if (over) { free(me.pending[i].second); me.pending.erase(me.pending.begin() + i); } else i++;
  }
}

}  // namespace standin
