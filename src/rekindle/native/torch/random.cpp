#include "random.h"

#include <ATen/Context.h>
#include <ATen/core/ivalue.h>

#include <mutex>
#include <utility>

#include "device.h"

namespace rekindle {

namespace {

at::CPUGeneratorImpl& impl_of(const at::Generator& generator) {
    return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

}  // namespace

Random::Random(at::Generator generator) : generator_(std::move(generator)) {
    at::CPUGeneratorImpl& impl = impl_of(generator_);
    const std::scoped_lock guard(impl.mutex_);
    data_ = impl.engine().data();
    next_float_ = impl.next_float_normal_sample();
    next_double_ = impl.next_double_normal_sample();
}

Random::Random(at::Generator generator, const MtState& around, const MtWords& words)
    : generator_(std::move(generator)),
      data_{around.seed, around.left, around.seeded, around.next, words},
      next_float_(around.next_float),
      next_double_(around.next_double) {}

void Random::restore() const {
    at::CPUGeneratorImpl& impl = impl_of(generator_);
    const std::scoped_lock guard(impl.mutex_);
    at::mt19937 engine = impl.engine();
    engine.set_data(data_);
    impl.set_engine(engine);
    impl.set_next_float_normal_sample(next_float_);
    impl.set_next_double_normal_sample(next_double_);
}

bool Random::is_at(const Random& other) const noexcept {
    return data_.left_ == other.data_.left_ && data_.next_ == other.data_.next_ &&
           data_.seed_ == other.data_.seed_ && data_.state_ == other.data_.state_ &&
           next_float_ == other.next_float_ && next_double_ == other.next_double_;
}

PhiloxState PhiloxState::of(const at::Generator& generator) {
    const std::scoped_lock guard(generator.getIntrusivePtr()->mutex_);
    return {generator.current_seed(), generator.get_offset()};
}

void PhiloxState::restore(at::Generator generator) const {
    const std::scoped_lock guard(generator.mutex());
    generator.set_current_seed(seed);
    generator.set_offset(offset);
}

at::Generator default_generator(c10::Device device) {
    return at::globalContext().defaultGenerator(device);
}

at::Generator given_generator(std::span<const c10::IValue> unkeyed_args) {
    for (const c10::IValue& extra : unkeyed_args) {
        if (extra.isGenerator()) {
            return extra.toGenerator();
        }
    }
    return {};
}

bool is_known(const at::Generator& generator) noexcept {
    return generator.defined() &&
           (generator.device().is_cpu() || generator.device().type() == ACCELERATOR);
}

}  // namespace rekindle
