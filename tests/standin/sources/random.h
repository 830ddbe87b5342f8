// The device's generator: seed and offset, 16 bytes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include "streams.h"

namespace standin {

using at::Tensor;

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = 0, offset_ = 0;
  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(DEVICE_TYPE, d), c10::DispatchKeySet(DEVICE_KEY)) {}
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { auto s = c10::detail::getNonDeterministicRandom(false); set_current_seed(s); return s; }
  void set_state(const c10::TensorImpl& t) override {
    TORCH_CHECK(t.numel() == 16, "RNG state is wrong size");
    memcpy(&seed_, t.data(), 8);
    memcpy(&offset_, (const char*)t.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte);
    memcpy(t.mutable_data_ptr(), &seed_, 8);
    memcpy((char*)t.mutable_data_ptr() + 8, &offset_, 8);
    return Tensor(t).getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* g = new Generator(device().index());
    g->seed_ = seed_; g->offset_ = offset_;
    return g;
  }
};
inline const at::Generator& default_generator(int d) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all->at(d < 0 ? this_device : d);
}
inline at::Generator drawn(std::optional<at::Generator> g, int d) {  // what one kernel draws from; moves the offset at once
  auto gen = g && g->defined() && g->device().type() == DEVICE_TYPE ? *g : default_generator(d);
  Lock l(gen.mutex());
  auto* impl = static_cast<Generator*>(gen.unsafeGetGeneratorImpl());
  uint64_t x = impl->seed_ * 0x9E3779B97F4A7C15ull + impl->offset_ * 0xBF58476D1CE4E5B9ull;
  impl->offset_ += 4;
  return at::make_generator<at::CPUGeneratorImpl>(x ^ (x >> 29));
}

}  // namespace standin
