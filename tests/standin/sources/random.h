// The device's generator: seed and offset, 16 bytes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include "streams.h"

namespace standin {

using at::Tensor;

inline std::atomic<int64_t> states_set{0};  // each makes CUDA's next RNN with dropout reseed
inline std::atomic<bool> capturing{false};  // during capture queries are refused
struct Position { uint64_t seed = 0, offset = 0; };
struct Generator final : c10::GeneratorImpl {
  std::shared_ptr<Position> at = std::make_shared<Position>();
  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(DEVICE_TYPE, d), c10::DispatchKeySet(DEVICE_KEY)) {}
  void was_set() { if (this == the_default(device().index())) states_set++; }
  void set_current_seed(uint64_t s) override { *at = {s, 0}; was_set(); }
  void set_offset(uint64_t o) override { at->offset = o; was_set(); }
  uint64_t get_offset() const override { asked.generator++; return at->offset; }
  uint64_t current_seed() const override { asked.generator++; return at->seed; }
  uint64_t seed() override { auto s = c10::detail::getNonDeterministicRandom(false); set_current_seed(s); return s; }
  void set_state(const c10::TensorImpl& t) override {
    TORCH_CHECK(!capturing, "set_state while a graph is captured");
    TORCH_CHECK(t.numel() == 16, "RNG state is wrong size");
    memcpy(&at->seed, t.data(), 8);
    memcpy(&at->offset, (const char*)t.data() + 8, 8);
    was_set();
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    TORCH_CHECK(!capturing, "get_state while a graph is captured");
    auto t = at::detail::empty_cpu({16}, at::kByte);
    memcpy(t.mutable_data_ptr(), &at->seed, 8);
    memcpy((char*)t.mutable_data_ptr() + 8, &at->offset, 8);
    return Tensor(t).getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    asked.generator++;
    auto* g = new Generator(device().index());
    *g->at = *at;
    return g;
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    at = static_cast<Generator*>(other.get())->at;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto g = c10::make_intrusive<Generator>(device().index());
    g->at = at;
    return g;
  }
  static Generator* the_default(int d);
};
inline const at::Generator& default_generator(int d) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(d < 0 ? this_device : d);
}
inline Generator* Generator::the_default(int d) { return static_cast<Generator*>(default_generator(d).unsafeGetGeneratorImpl()); }
inline at::Generator drawn(std::optional<at::Generator> g, int d) {  // the state for one kernel; advances the offset at once
  auto gen = g && g->defined() && g->device().type() == DEVICE_TYPE ? *g : default_generator(d);
  Lock l(gen.mutex());
  auto* impl = static_cast<Generator*>(gen.unsafeGetGeneratorImpl());
  uint64_t x = impl->at->seed * 0x9E3779B97F4A7C15ull + impl->at->offset * 0xBF58476D1CE4E5B9ull;
  impl->at->offset += 4;
  return at::make_generator<at::CPUGeneratorImpl>(x ^ (x >> 29));
}

}  // namespace standin
