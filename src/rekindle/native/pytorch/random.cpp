#include "random.h"

#include <ATen/core/ivalue.h>

#include <mutex>

namespace rekindle {

namespace {

at::CPUGeneratorImpl& impl_of(const at::Generator& generator) {
    return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

}  // namespace

Random::Random(const at::Generator& generator) : generator_(generator) {
    at::CPUGeneratorImpl& impl = impl_of(generator_);
    const std::lock_guard<std::mutex> guard(impl.mutex_);
    data_ = impl.engine().data();
    next_float_ = impl.next_float_normal_sample();
    next_double_ = impl.next_double_normal_sample();
}

Random::Random(const at::Generator& generator, const Around& around, const Words& words)
    : generator_(generator),
      data_{around.seed, around.left, around.seeded, around.next, words},
      next_float_(around.next_float),
      next_double_(around.next_double) {}

void Random::restore() const {
    at::CPUGeneratorImpl& impl = impl_of(generator_);
    const std::lock_guard<std::mutex> guard(impl.mutex_);
    at::mt19937 engine = impl.engine();
    engine.set_data(data_);
    impl.set_engine(engine);
    impl.set_next_float_normal_sample(next_float_);
    impl.set_next_double_normal_sample(next_double_);
}

at::Generator generator_of(std::span<const c10::IValue> extras) {
    for (const c10::IValue& extra : extras) {
        if (extra.isGenerator()) {
            const at::Generator given = extra.toGenerator();
            return given.defined() && given.device().is_cpu() ? given : at::Generator();
        }
    }
    return at::detail::getDefaultCPUGenerator();
}

}  // namespace rekindle
