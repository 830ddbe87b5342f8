// Evicts user-held values like all other values; see the note in held_eviction.h.
#include "held_eviction.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

#include "../../torch/backward.h"
#include "../../torch/geometry.h"
#include "../../torch/pyobjects.h"
#include "../../torch/raised.h"
#include "../observers/program.h"
#include "../room/without_copies.h"

namespace rekindle {

// Results that are integers or single numbers are never evictable: they may be lengths or indices,
// which composite functions read directly, before any of their operators runs.
bool is_returnable(const c10::TensorImpl& tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && tensor.dim() != 0;
}

namespace {

// Sources below this size stay in memory: a copy of one takes as long as that of a page.
constexpr Bytes LEAST_MOVED = Bytes{4} << 10;

// Return why `record`, a source, must stay in memory while the program holds it, or null if it may
// be moved to the host and back.
const char* why_it_stays(const StorageRecord& record, const Frees& frees) noexcept {
    if (record.special.is_gathered()) {
        return "FSDP frees it and gathers it again";
    }
    if (record.untracked && !frees.registry.device.queues()) {
        return "PyTorch did not allocate it, or other processes share it";
    }
    if (record.special.is_external()) {
        return "other code may write it: it was passed to NumPy, DLPack or another process";
    }
    if (record.read_unseen) {
        return "its address left PyTorch, as by data_ptr(), untyped_storage() or a collective";
    }
    if (record.pinned || record.absent) {
        return "run.keep was called for it, or operators need it in memory";
    }
    if (record.nbytes < (frees.events.tests.evict_before_every_op ? 1 : LEAST_MOVED)) {
        return "it is small";
    }
    return record.suits_held_eviction ? nullptr
                                      : "it holds integers, has a storage object, or is not plain";
}

// Return true if `record`, a source, may be moved to the host and back while the program holds it.
bool may_move(const StorageRecord& record, const Frees& frees) noexcept {
    return frees.events.swapper != nullptr && !record.replayable && record.listed &&
           why_it_stays(record, frees) == nullptr;
}

// Return true if `record` is evicted, or may be evicted while other threads run. A value that has
// lost its recipe stays a candidate if sources may be moved.
bool may_leave(const StorageRecord& record, const Frees& frees) noexcept {
    return record.replayable ||
           (frees.events.swapper != nullptr &&
            (record.evictable_while_held || !record.resident || may_move(record, frees)));
}

}  // namespace

// Values made by `empty` or `zeros` that no operator has written are never evicted while the
// program holds them: other code may have written them unseen (R4, sources). `flags` is not 0 for
// such values.
bool may_return(const StorageRecord& record) noexcept {
    return record.suits_held_eviction && record.replayable && record.listed && record.flags == 0;
}

// Results of dtype int32 or int64 are not evicted while the program holds them: they may be lengths
// or indices. Composite functions (`tensor_split`, `pad_packed_sequence`) read these directly,
// before any of their operators runs.
bool HeldEviction::is_returnable(const c10::TensorImpl& tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return dtype != c10::ScalarType::Long && dtype != c10::ScalarType::Int;
}

// A result of a backward pass gets no recipe if it can be moved: a recipe would keep inputs that
// the backward pass is about to free.
bool HeldEviction::records_without_grad() const {
    return open && unrecorded == 0 && !(moves() && in_backward_pass());
}

// -- sources --------------------------------------------------------------------------------------

void HeldEviction::offer(StorageRecord& record, const c10::TensorImpl& tensor) {
    if (!open || !moves() || record.replayable) {
        return;
    }
    if (record.role != Role::parameter && is_weight(tensor)) {
        record.role = Role::parameter;
    }
    if (record.evictable_while_held) {
        return;
    }
    if (!record.suits_held_eviction && !record.read_unseen) {
        record.suits_held_eviction = is_plain(tensor) && is_returnable(tensor) &&
                                     !is_named(*tensor.unsafe_storage().unsafeGetStorageImpl());
    }
    if (!paused_ && is_evictable_now(record) && !is_read_unlocked(record)) {
        frees_.engine.set_evictable_while_held(record, true);
    }
}

// Return true if something reads the memory of `record` now and has not locked it. Scenarios:
// another thread reads a source that was no candidate for eviction when its operator began; another
// thread uses a part of the same memory, and its operator has locked the record of the contents
// before.
bool HeldEviction::is_read_unlocked(const StorageRecord& record) const {
    return record.locks == 0 && in_progress_.uses(record);
}

std::vector<PinnedSource> HeldEviction::pinned() const {
    std::vector<PinnedSource> found;
    for (Storage* each = frees_.engine.first_storage(); each != nullptr; each = each->next) {
        const StorageRecord& record = record_of(*each);
        if (record.replayable || !record.resident || !record.is_held() ||
            record.nbytes < LEAST_MOVED) {
            continue;
        }
        if (const char* why = why_it_stays(record, frees_); why != nullptr) {
            found.push_back({record.origin, record.nbytes, record.site(), why});
        }
    }
    return found;
}

// -- reading held values --------------------------------------------------------------------------

void HeldEviction::bring(const StorageList& storages, Kept& kept, Locked& lock) {
    if (!open) {
        return;
    }
    const auto empty = [](const c10::StorageImpl* storage_impl) {
        return is_placeholder(*storage_impl);
    };
    if (std::ranges::any_of(storages, empty)) {
        about_to_let_go(lock);
    }
    frees_.process_pending_if_needed();
    node_changes();
    if (std::ranges::any_of(backward_working_set_, &HeldEviction::is_over)) {
        about_to_let_go(lock);
        pin_survivors();
    }
    // First lock the values that are in memory. Otherwise they might be evicted to make room for
    // those that must be restored.
    for (const bool missing : {false, true}) {
        for (const c10::StorageImpl* storage_impl : storages) {
            StorageRecord* record = frees_.registry.find_record(*storage_impl);
            if (record == nullptr || (!missing && !record->resident)) {
                continue;
            }
            refuse_lost(*record);
            if (!may_leave(*record, frees_)) {
                continue;
            }
            const Ref<Storage> storage(record);
            const auto same = [&](const Ref<Storage>& each) { return each.get() == storage.get(); };
            if (std::ranges::any_of(kept, same)) {
                continue;
            }
            // the value may be in memory now, if the recomputation of another one restored it
            if (!storage->resident) {
                // Python's garbage collector may have freed storages meanwhile
                frees_.process_pending();
                room_.use(record_of(*storage));
            }
            frees_.events.finish_swap_in(record_of(*storage));
            frees_.engine.lock(*storage);
            kept.push_back(storage);
        }
    }
}

void HeldEviction::done(Frees& frees, Kept& kept) {
    while (!kept.empty()) {
        const Ref<Storage> storage = std::move(kept.front());
        // Remove the entry before unlocking, so that the storage is unlocked only once even if
        // `perform` throws.
        kept.erase(kept.begin());
        frees.events.perform([&] { frees.engine.unlock(*storage); });
    }
}

std::int64_t HeldEviction::begin_reading(const StorageList& storages, bool writes, Locked& lock) {
    Kept kept;
    auto& operands = in_progress_.operands;
    operands.insert(operands.end(), storages.begin(), storages.end());
    try {
        or_without_copies(frees_, lock, [&] { attempt([&] { bring(storages, kept, lock); }); });
        for (const Ref<Storage>& each : kept) {
            if (writes) {
                frees_.events.about_to_write(record_of(*each));
            }
        }
    } catch (std::exception& error) {
        in_progress_.release(storages);
        after(error, [&] { done(frees_, kept); });
        throw;
    }
    reads_[++numbers_] = {std::move(kept), storages};
    return numbers_;
}

void HeldEviction::end_reading(std::int64_t number) {
    const auto found = reads_.find(number);
    if (found != reads_.end()) {
        in_progress_.release(found->second.storages);
        done(frees_, found->second.kept);
        reads_.erase(found);
    }
}

PinnedOperands::PinnedOperands(
    Frees& frees,
    HeldEviction& eviction,
    InProgress& in_progress,
    const StorageList& storages,
    Locked& lock
)
    : frees_(frees), in_progress_(in_progress), storages_(storages) {
    in_progress_.operands.insert(in_progress_.operands.end(), storages.begin(), storages.end());
    try {
        or_without_copies(frees, lock, [&] {
            eviction.attempt([&] { eviction.bring(storages, kept_, lock); });
        });
    } catch (std::exception& error) {
        after(error, [&] { end(); });
        throw;
    }
}

void PinnedOperands::end() {
    if (!std::exchange(ended_, true)) {
        in_progress_.release(storages_);
    }
    HeldEviction::done(frees_, kept_);
}

PinnedOperands::~PinnedOperands() {
    // It has not ended here only after an exception, which may have released the mutex.
    if (!ended_ || !kept_.empty()) {
        without_throwing([&] {
            const auto lock = locked_if_not_mine();
            end();
        });
    }
}

// Record that an operator made or wrote the value of `record`. In a backward pass, a result made
// with grad mode off is a gradient. Let gradients be evicted last, because recomputing one needs
// inputs that the backward pass is about to free.
void HeldEviction::made(StorageRecord& record) {
    if (!open) {
        return;
    }
    if (record.role == Role::unknown && !record.replayable) {
        if (in_backward_pass()) {
            record.role = Role::gradient;
        } else if (room_.stepping.is_set()) {
            record.role = Role::state;
        }
    }
    const bool without_grad = !c10::GradMode::is_enabled();
    if (record.evictable_while_held || paused_ || !is_evictable_now(record) ||
        is_read_unlocked(record)) {
        return;
    }
    if (record.replayable && without_grad && exceeds_chain_limit(record)) {
        room_.seal(record);
    } else if (record.replayable && without_grad && in_backward_pass()) {
        frees_.engine.set_evictable_last(record);
        work_with(record);
    } else {
        frees_.engine.set_evictable_while_held(record, true);
    }
}

void HeldEviction::pin_while_held(StorageRecord& record) {
    if (open && record.evictable_while_held) {
        node_changes();
        const void* node = torch::autograd::get_current_node().get();
        if (node == nullptr) {
            return;  // unpacked outside of a backward pass, so operators read it
        }
        frees_.engine.set_evictable_while_held(record, false);
        unpacked_.push_back({std::this_thread::get_id(), node, Ref<Storage>(&record)});
        if (in_backward_pass() && record.replayable) {
            work_with(record);
        }
    }
}

// Allow eviction of values that autograd unpacked in this thread for a backward node that has
// finished.
void HeldEviction::node_changes() {
    if (unpacked_.empty()) {
        return;
    }
    const void* node = torch::autograd::get_current_node().get();
    const std::thread::id thread = std::this_thread::get_id();
    // True if the node that unpacked `each` has finished: this thread runs another node now or, if
    // the node ran in another thread, no thread runs a backward pass.
    const auto is_over = [&](const Unpacked& each) {
        return each.thread == thread ? each.node != node : !is_any_backward_pass();
    };
    std::vector<Unpacked> left;
    std::ranges::copy_if(unpacked_, std::back_inserter(left), is_over);
    std::erase_if(unpacked_, is_over);
    for (const Unpacked& each : left) {
        const StorageRecord& record = record_of(*each.storage);
        if (!paused_ && is_evictable_now(record)) {
            frees_.engine.set_evictable_while_held(*each.storage, true);
        }
    }
}

// Return true if `record` may be evicted: no backward node that autograd runs now has unpacked its
// value.
bool HeldEviction::is_evictable_now(const StorageRecord& record) const noexcept {
    return (may_return(record) || may_move(record, frees_)) &&
           std::ranges::none_of(unpacked_, [&](const Unpacked& each) {
               return each.storage.get() == &record;
           });
}

void HeldEviction::work_with(StorageRecord& record) {
    backward_working_set_.push_back({std::this_thread::get_id(), Ref<Storage>(&record)});
}

// Return true if the backward pass in which the value of `worked` was made or used has surely
// finished. It ran in this thread, or in a thread of autograd. In the second case, it counts as
// finished once no thread runs a backward pass.
bool HeldEviction::is_over(const UsedInBackward& worked) {
    return !in_backward_pass() &&
           (worked.thread == std::this_thread::get_id() || !is_any_backward_pass());
}

// Pin values that survive a backward pass, such as gradients, and drop their recipes. A gradient,
// or a state that the program carries to the next batch, would otherwise keep the inputs of every
// batch so far in memory.
void HeldEviction::pin_survivors() {
    std::vector<UsedInBackward> worked;
    std::ranges::copy_if(backward_working_set_, std::back_inserter(worked), &HeldEviction::is_over);
    std::erase_if(backward_working_set_, &HeldEviction::is_over);
    std::vector<Ref<Storage>> left;
    for (const UsedInBackward& each : worked) {
        const Ref<Storage>& storage = each.storage;
        frees_.process_pending();
        if (!storage->held || !storage->listed || !storage->replayable ||
            room_.is_without_room(record_of(*storage))) {
            continue;
        }
        if (!storage->resident) {
            room_.use(record_of(*storage));
        }
        if (moves()) {
            make_source(record_of(*storage));
        } else {
            frees_.engine.set_evictable_while_held(*storage, false);
            left.push_back(storage);
        }
    }
    frees_.engine.clear_reserve();
    for (const UsedInBackward& each :
         backward_working_set_) {  // keep the entries of backward passes that still run
        if (each.storage->evictable_while_held && each.storage->listed) {
            frees_.engine.set_evictable_last(*each.storage);
        }
    }
    for (const Ref<Storage>& each : left) {
        const bool may = each->listed && each->replayable && may_forget(record_of(*each));
        if (may &&
            !frees_.registry.observers.recorded) {  // a trace has no event for a dropped recipe
            room_.seal(record_of(*each));
        }
    }
    frees_.process_pending();
}

// Drop the recipe of `record`, which is in memory. Let it move to the host from now on.
void HeldEviction::make_source(StorageRecord& record) {
    if (may_forget(record)) {
        room_.seal(record);
        if (const auto tensor = record.origin.lock()) {
            offer(record, *tensor);
        }
    }
}

// -- when held values stay ------------------------------------------------------------------------

void HeldEviction::about_to_let_go(Locked& lock) {
    bool known = false;
    {
        const Unlocked others(lock);
        known = all_threads_are_known(frees_.registry.observers);
    }
    frees_.registry.drain();
    if (open) {
        node_changes();
        pause(!known || in_progress_.reading_anything != 0);
    }
}

// If `pause`, exclude all user-held values from eviction, because a thread that the runtime does
// not know may read any of them. Otherwise allow their eviction again.
void HeldEviction::pause(bool pause) {
    if (pause == std::exchange(paused_, pause)) {
        return;
    }
    if (pause) {
        frees_.events.about_to_write_anything();
    }
    for (Storage* each = frees_.engine.first_storage(); each != nullptr; each = each->next) {
        const StorageRecord& record = record_of(*each);
        if (pause ? record.evictable_while_held : is_evictable_now(record)) {
            frees_.engine.set_evictable_while_held(*each, !pause);
        }
    }
}

// Return true if the chain of recipes from the nearest value without a recipe to `record` is too
// long. With grad mode off nothing else ends such a chain: there is no autograd graph and no
// optimizer step.
bool HeldEviction::exceeds_chain_limit(StorageRecord& record) const {
    constexpr int most = std::numeric_limits<std::uint16_t>::max();
    int chain = 0;
    each_parent(record, [&](Storage& parent) {
        if (parent.replayable) {  // a value without a recipe is where the chain of recipes starts
            chain = std::max<int>(chain, record_of(parent).chain);
        }
    });
    record.chain = static_cast<std::uint16_t>(std::min(chain + 1, most));
    return chain + 1 > std::min<int>(history_.longest_chain, most - 1);
}

bool HeldEviction::release_dead_sources(Bytes least) {
    if (frees_.registry.observers.recorded) {  // a trace has no event for a dropped recipe
        return false;
    }
    std::vector<Ref<Storage>> sources = dead_sources(frees_.engine);
    const Bytes all = bytes_of(sources);
    if (all < least) {
        return false;
    }
    const Bytes wanted = least > 0 ? least : all;
    // Values whose recipes read a released source stay in memory, so release few: the largest.
    std::ranges::sort(sources, [](const Ref<Storage>& one, const Ref<Storage>& other) {
        return std::pair(other->nbytes, one->id) < std::pair(one->nbytes, other->id);
    });
    const Bytes before = frees_.engine.memory;
    for (const Ref<Storage>& source : sources) {
        if (before - frees_.engine.memory >= wanted) {
            break;
        }
        if (!source->listed || !sources_.without_room_that_need(record_of(*source)).empty()) {
            continue;
        }
        try {
            sources_.forget(record_of(*source));
        } catch (const OutOfBudgetError&) {
            continue;
        }
        frees_.disown(record_of(*source));
        frees_.process_pending();
    }
    return frees_.engine.memory < before;
}

// With grad mode off, release values without a recipe that the program has freed, once they take a
// quarter of the budget. Only recipes of other values need them. These other values are restored
// first, because later there would be no room for that.
void HeldEviction::look_at_sources(Locked& lock) {
    const Engine& engine = frees_.engine;
    if (!open || c10::GradMode::is_enabled() || in_backward_pass() || --until_look_ > 0) {
        return;
    }
    until_look_ = OPERATORS_BETWEEN_LOOKS;
    if (engine.memory <= engine.budget / 2) {
        return;
    }
    if (const Bytes nbytes = bytes_of(dead_sources(engine)); nbytes > engine.budget / 4) {
        about_to_let_go(lock);
        release_dead_sources(nbytes);
    }
}

// -- the end of the budget ------------------------------------------------------------------------

void HeldEviction::close() {
    open = false;
    unpacked_.clear();
    backward_working_set_.clear();
    for (Storage* each = frees_.engine.first_storage(); each != nullptr; each = each->next) {
        if (each->evictable_while_held) {
            frees_.engine.set_evictable_while_held(*each, false);
        }
    }
    frees_.engine.clear_reserve();
}

}  // namespace rekindle
