#include "views.h"

#include <ATen/ops/alias_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>

#include "../base/mutex.h"
#include "../memory/held_eviction.h"
#include "../memory/program.h"
#include "../ops/signature.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"

namespace rekindle {

void register_base(Driver& driver, Locked& lock, const c10::TensorImpl& whole) {
    if (has_memory(whole)) {
        driver.process_pending_if_needed();
        if (driver.held_eviction &&
            driver.find_by_address(*whole.unsafe_storage().unsafeGetStorageImpl()) == nullptr) {
            about_to_let_go(driver, lock);
        }
        driver.register_tensor(whole);
    }
}

namespace {

// Unboxed kernel for the core's dispatch key, of the same type as the operator's own kernel.
template <auto redispatch>
struct View;

template <
    class Result,
    class... Rest,
    Result (*redispatch)(c10::DispatchKeySet, const at::Tensor&, Rest...)>
struct View<redispatch> final {
    static Result run(c10::DispatchKeySet keys, const at::Tensor& whole, Rest... rest) {
        if (const c10::intrusive_ptr<Driver> driver = lock_and_see(keys)) {
            translate_errors(*driver, [&] {
                Locked lock(std::adopt_lock);
                if (!driver->device.is_capturing()) {
                    register_base(*driver, lock, *whole.unsafeGetTensorImpl());
                }
            });
            notify(*driver);
        }
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        return redispatch(keys & BELOW_KEY, whole, std::forward<Rest>(rest)...);
    }
};

template <class Op>
void see(torch::Library& aten) {
    constexpr auto kernel = &View<&Op::redispatch>::run;
    std::string name = Op::name;
    if (*Op::overload_name != '\0') {
        name += std::string(".") + Op::overload_name;
    }
    aten.impl(name.c_str(), torch::CppFunction::makeFromUnboxedFunction(TORCH_FN(kernel)));
}

}  // namespace

void register_view_kernels(torch::Library& aten) {
    see<at::_ops::alias>(aten);
    see<at::_ops::as_strided>(aten);
    see<at::_ops::detach>(aten);
    see<at::_ops::expand>(aten);
    see<at::_ops::permute>(aten);
    see<at::_ops::select_int>(aten);
    see<at::_ops::slice_Tensor>(aten);
    see<at::_ops::split_Tensor>(aten);
    see<at::_ops::split_with_sizes>(aten);
    see<at::_ops::squeeze_dim>(aten);
    see<at::_ops::t>(aten);
    see<at::_ops::transpose_int>(aten);
    see<at::_ops::unbind_int>(aten);
    see<at::_ops::unsqueeze>(aten);
    see<at::_ops::view>(aten);
}

}  // namespace rekindle
