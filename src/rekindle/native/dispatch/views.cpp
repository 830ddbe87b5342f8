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

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "../ops/signature.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "effects.h"

namespace rekindle {

void register_base(Session& session, Locked& lock, const c10::TensorImpl& whole) {
    if (has_memory(whole)) {
        session.frees.process_pending_if_needed();
        if (session.registry.find(whole) == nullptr) {
            find_or_register(session, lock, whole);
        }
        session.sources.note_shared_version_counter(whole);
    }
}

namespace {

// Evict values to make room for a copy of `whole`, a sparse tensor: its transpose has indices and
// values of its own. The kernel copies a part of the indices once more.
void make_room_for_copy(Session& session, Locked& lock, const at::Tensor& whole) {
    Bytes nbytes = 0;
    Bytes largest = 0;
    for (const at::Tensor& part : parts_of(whole)) {
        const Bytes counted =
            session.registry.devices.counted(*part.storage().unsafeGetStorageImpl());
        nbytes += counted;
        largest = std::max(largest, counted);
    }
    retry_evicting_held(session, lock, [&] {
        session.room.make_room(nbytes + largest, "the transpose of a sparse tensor");
    });
}

// True if the result of a view operator on a sparse tensor is a copy.
template <class Op>
constexpr bool COPIES_SPARSE =
    std::is_same_v<Op, at::_ops::t> || std::is_same_v<Op, at::_ops::transpose_int> ||
    std::is_same_v<Op, at::_ops::permute>;

// Count the memory of `copy`, if it was not counted before.
void count_copy(Session& session, const at::Tensor& copy) {
    Bytes made = 0;
    for (const at::Tensor& part : parts_of(copy)) {
        made += session.registry.count(*part.storage().unsafeGetStorageImpl(), nullptr);
    }
    session.storages.count(0, made, 0);
}

// Kernel of a view operator for Rekindle's dispatch key. It has the C++ type of the operator's own
// kernel, so that arguments are not boxed.
template <class Op, auto redispatch>
struct View;

template <
    class Op,
    class Result,
    class... Rest,
    Result (*redispatch)(c10::DispatchKeySet, const at::Tensor&, Rest...)>
struct View<Op, redispatch> final {
    static Result run(c10::DispatchKeySet keys, const at::Tensor& whole, Rest... rest) {
        if (shares_key && (is_in_fake_mode() || is_fake(whole))) [[unlikely]] {
            torch::jit::Stack stack;
            torch::jit::push(stack, whole, rest...);
            call_kernel_behind(find<Op>(), keys, stack);
            return std::move(stack.back()).to<Result>();
        }
        if (const c10::intrusive_ptr<Session> session = lock_and_see(keys)) {
            [[maybe_unused]] const bool copies = translate_errors(*session, [&] {
                Locked lock(std::adopt_lock);
                // A view that the body of an operator makes of its own result must not register the
                // result as memory that was there before.
                const bool is_inside =
                    session->in_progress.observed != 0 && Effects::current() != nullptr;
                if (!is_inside && !session->events.only_counting.on() &&
                    !session->device.is_capturing()) {
                    register_base(*session, lock, *whole.unsafeGetTensorImpl());
                }
                if constexpr (COPIES_SPARSE<Op>) {
                    if (!is_inside && whole.is_sparse() && !session->device.is_capturing())
                        [[unlikely]] {
                        make_room_for_copy(*session, lock, whole);
                        return true;
                    }
                }
                return false;
            });
            notify(*session);
            if constexpr (COPIES_SPARSE<Op>) {
                if (copies) [[unlikely]] {
                    Result copy = redispatched(keys, whole, std::forward<Rest>(rest)...);
                    const Locked lock;
                    count_copy(*session, copy);
                    return copy;
                }
            }
        }
        return redispatched(keys, whole, std::forward<Rest>(rest)...);
    }

private:
    static Result redispatched(c10::DispatchKeySet keys, const at::Tensor& whole, Rest... rest) {
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        return redispatch(keys & BELOW_KEY, whole, std::forward<Rest>(rest)...);
    }
};

template <class Op>
void add_view() {
    register_kernel<Op, &View<Op, &Op::redispatch>::run>();
}

}  // namespace

void register_view_kernels() {
    add_view<at::_ops::alias>();
    add_view<at::_ops::as_strided>();
    add_view<at::_ops::detach>();
    add_view<at::_ops::expand>();
    add_view<at::_ops::permute>();
    add_view<at::_ops::select_int>();
    add_view<at::_ops::slice_Tensor>();
    add_view<at::_ops::split_Tensor>();
    add_view<at::_ops::split_with_sizes>();
    add_view<at::_ops::squeeze_dim>();
    add_view<at::_ops::t>();
    add_view<at::_ops::transpose_int>();
    add_view<at::_ops::unbind_int>();
    add_view<at::_ops::unsqueeze>();
    add_view<at::_ops::view>();
}

}  // namespace rekindle
