#include "frees.h"

#include <c10/util/ScopeExit.h>

#include <utility>

namespace rekindle {

void Frees::poll() {
    assert_locked();
    registry.poll_untracked(registry.device.queues());
    if (registry.device.queues()) {
        process_pending();
        // `ask_allocator` returns false if the engine still counts storages that the program freed
        if (!outside.ask_allocator()) {
            look_at_all();
        }
    }
    poll_held();
}

void Frees::look_at_all() {
    registry.poll_untracked();
    process_pending();
}

void Frees::poll_held() {
    registry.held_list.each([&](StorageRecord& record) {
        if (may_drop(record) && !record.is_held()) {
            registry.held_list.remove(record);
            events.perform([&] { engine.drop(record); });
        }
    });
}

void Frees::process_pending() {
    assert_locked();
    // A storage without a deleter hook does not report its free. So on a CPU, poll these storages
    // at every 64th call. On a device `poll` does so before every eviction.
    const bool now_and_then = !registry.device.queues() && (++ticks_ & 63U) == 0;
    if (now_and_then || registry.untracked.are_due()) [[unlikely]] {
        registry.poll_untracked();
    }
    registry.drain();
    std::size_t handles = 0;
    std::size_t memories = 0;
    // After an error the rest stays, but nothing is reported twice.
    const auto reported = c10::make_scope_exit([&] {
        const auto remove_first = [](auto& list, std::size_t n) {
            list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(n));
        };
        remove_first(registry.pending.handles, handles);
        remove_first(registry.pending.storages, memories);
    });
    while (handles < registry.pending.handles.size() ||
           memories < registry.pending.storages.size() || !registry.pending.restored.empty()) {
        if (handles < registry.pending.handles.size()) {
            StorageRecord& record = *registry.pending.handles[handles++];
            release(record);
        } else if (memories < registry.pending.storages.size()) {
            const Ref<Storage> record = registry.pending.storages[memories++];
            gone(record_of(*record));
        } else {
            const Ref<Storage> record = std::move(registry.pending.restored.back());
            registry.pending.restored.pop_back();
            hand_back(record_of(*record));
        }
        let_go_of_idle();
        // The calls above may have freed storages. Their addresses are now in the queue of freed
        // memory.
        registry.drain();
    }
    if (registry.moved_tensors.any()) [[unlikely]] {
        registry.moved_tensors.drop_unreferenced();
    }
    if (registry.pending.counted != 0) {
        engine.account(0, -std::exchange(registry.pending.counted, 0));
    }
    if (std::exchange(registry.pending.found_by_polling, false)) [[unlikely]] {
        // Query the device's allocator again. At the last query the allocator had already
        // subtracted the storages that the engine learns only now to be freed.
        outside.ask_allocator();
    }
    // Free host copies, but not during CUDA graph capture: freeing one waits for its transfer, and
    // waiting is impossible then.
    if (events.has_discarded() && !registry.device.is_capturing()) [[unlikely]] {
        events.perform([&] { engine.discards(); });
    }
}

// Report to the engine that the value of `record` is no longer in memory: the program freed the
// storage, or moved the value to another one.
void Frees::gone(StorageRecord& record) {
    if (record.address != nullptr) {
        return;
    }
    if (record.placeholder) [[unlikely]] {
        static_cast<void>(registry.detach_placeholder(record));
        registry.held_list.remove(record);
        events.perform([&] { record.references != 0 ? engine.drop(record) : engine.gone(record); });
        return;
    }
    if (!record.resident) {
        return;
    }
    if (const StoragePtr storage_impl = record.at()) {
        resized(record);
        return;
    }
    registry.held_list.remove(record);
    events.perform([&] { engine.gone(record); });
}

// Release the reference to `record` that belonged to a saved-tensor handle of autograd. The handle
// was destroyed.
void Frees::release(StorageRecord& record) {
    StorageRecord& now = current(record);
    const Ref<Storage> kept(&now);
    events.perform([&] { engine.release(now); });
    disown(now);
    let(static_cast<Storage&>(record));
}

// Release the runtime's reference to the restored storage of `record`, if autograd does not refer
// to the value. Then the program is the only owner of the memory.
void Frees::hand_back(StorageRecord& record) {
    if (record.resident && (record.replayable || events.swapper != nullptr)) {
        registry.held_list.add(record);
    }
    if (record.resident) {
        disown(record);
    }
}

// Return true if `poll_held` must report to the engine that the program no longer holds `record`:
// autograd or, with swapping on, a recipe still needs the value. With swapping on, values in
// external memory are not reported, because plain PyTorch would read the current contents of that
// memory.
bool Frees::may_drop(const StorageRecord& record) const {
    if (events.swapper == nullptr) {
        return record.references != 0;
    }
    const bool wanted = !record.replayable && record.keeper && record.consumed();
    return (record.references != 0 || wanted) && !record.special.is_external();
}

void Frees::resized(StorageRecord& record) {
    const StoragePtr storage_impl = record.at();
    if (!storage_impl) {
        return;
    }
    const void* address = address_of(*storage_impl);
    if (address != record.address) {
        registry.table.take(record);
        registry.bind(record, storage_impl);
    }
    record.size = static_cast<Bytes>(storage_impl->nbytes());
    engine.resize(record, registry.devices.counted(*storage_impl));
    events.note_memory();
}

void Frees::disown(StorageRecord& record) {
    // A source (a value without a recipe) stays in memory while recipes read it.
    const bool stays = record.pinned || !record.replayable;
    const bool needed = record.references != 0 || (record.consumed() && stays);
    if (record.held && !needed) {
        registry.drop_keeper(
            record
        );  // from now on only the program, if anything, keeps the storage alive
    }
    let_go_of_idle();
}

void Frees::let_go_of_idle() {
    while (!engine.idle.empty()) [[unlikely]] {
        const Ref<Storage> idle = std::move(engine.idle.back());
        engine.idle.pop_back();
        if (idle->references == 0 && !idle->consumed()) {
            registry.drop_keeper(record_of(*idle));
        }
    }
}

}  // namespace rekindle
