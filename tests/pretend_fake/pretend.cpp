// A stand-in for PyTorch's FakeTensor in C++: a fallback at the dispatch key Fake, a mode that
// includes the key and clears it when the mode ends, and fake tensors, which have that key.
//
// The fallback fails if it gets a call that concerns neither the mode nor a fake tensor, because
// PyTorch's fallback would turn the results of such a call into fake tensors.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/FakeTensorModeTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace {

using c10::impl::FakeTensorModeTLS;

constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;
std::atomic<long> calls = 0;

bool is_fake(const at::Tensor& tensor) {
    return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(KEY);
}

// Make a fake tensor that shares the storage, without memory, of the meta tensor `meta`.
at::Tensor fake_of(const at::Tensor& meta) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(meta.storage()), meta.key_set().add(KEY), meta.dtype()
    );
    impl->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
    return at::Tensor(std::move(impl));
}

// Return a meta tensor of the same geometry.
at::Tensor meta_of(const at::Tensor& tensor) {
    return at::empty_strided(
        tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::Meta)
    );
}

// Apply `change` to each tensor among the last `n` values, also in lists.
template <class F>
void each_tensor(torch::jit::Stack& stack, std::size_t n, F&& change) {
    for (std::size_t i = stack.size() - n; i < stack.size(); ++i) {
        if (stack[i].isTensor()) {
            stack[i] = change(stack[i].toTensor());
        } else if (stack[i].isTensorList()) {
            auto list = stack[i].toTensorList().copy();
            for (std::size_t k = 0; k < list.size(); ++k) {
                list[k] = change(list[k]);
            }
            stack[i] = list;
        }
    }
}

void fallback(
    const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack
) {
    ++calls;
    const std::size_t n = op.schema().arguments().size();
    bool any = FakeTensorModeTLS::get_state() != nullptr;
    each_tensor(*stack, n, [&](at::Tensor tensor) {
        any = any || is_fake(tensor);
        return tensor;
    });
    TORCH_CHECK(any, "the FakeTensor got a call of ", op.operator_name(), " with real tensors");
    std::vector<std::pair<at::Tensor, at::Tensor>> given;  // meta tensor, and what it stands for
    c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    each_tensor(*stack, n, [&](at::Tensor tensor) {
        if (!tensor.defined()) {
            return tensor;
        }
        given.emplace_back(meta_of(tensor), tensor);
        return given.back().first;
    });
    for (std::size_t i = stack->size() - n; i < stack->size(); ++i) {
        if ((*stack)[i].isDevice()) {
            (*stack)[i] = c10::Device(c10::DeviceType::Meta);
        }
    }
    if (given.empty()) {  // an operator that makes tensors, such as `empty`
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
    } else {
        op.callBoxed(stack);
    }
    each_tensor(*stack, op.schema().returns().size(), [&](at::Tensor tensor) {
        for (const auto& [meta, before] : given) {
            if (meta.is_same(tensor)) {
                return before;
            }
        }
        return tensor.defined() ? fake_of(tensor) : tensor;
    });
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

#ifdef REKINDLE_PRETENDS_MODE
namespace {
thread_local std::shared_ptr<c10::FakeTensorMode> the_mode;
}

namespace c10::impl {

void FakeTensorModeTLS::set_state(std::shared_ptr<FakeTensorMode> state) {
    the_mode = std::move(state);
    tls_set_dispatch_key_included(KEY, the_mode != nullptr);
}

std::shared_ptr<FakeTensorMode> FakeTensorModeTLS::get_state() {
    return the_mode;
}

void FakeTensorModeTLS::reset_state() {
    set_state(nullptr);
}

}  // namespace c10::impl
#endif

extern "C" {

void enter_mode() {
    FakeTensorModeTLS::set_state(std::make_shared<c10::FakeTensorMode>(nullptr, nullptr));
    c10::impl::tls_set_dispatch_key_included(KEY, true);
}

// End the mode. Like PyTorch's, it clears the key although other code may have included it.
void exit_mode() {
    FakeTensorModeTLS::reset_state();
    c10::impl::tls_set_dispatch_key_included(KEY, false);
}

long n_calls() {
    return calls;
}
}
