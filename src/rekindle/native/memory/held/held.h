// The values that variables of the program refer to: which of them may be evicted now, and that all
// of them are back when the budget ends.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../../base/ref.h"
#include "../../engine/engine.h"
#include "../recomputer/in_progress.h"
#include "../registry/registry.h"
#include "../room/frees.h"
#include "../room/room.h"
#include "held_eviction.h"
#include "readers.h"

namespace rekindle {

class EvictHeldLast;
class Reading;

// The user-held values of one budget. The caller holds the session mutex.
class Held final : public HeldValues {
public:
    Held(Frees& frees, Room& room);
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    Held(Held&&) = delete;
    Held& operator=(Held&&) = delete;
    ~Held();

    bool evicts_last = false;  // user-held values may be evicted last (`evict="auto"`)
    std::unique_ptr<HeldEviction> eviction;  // null unless `evict="anything"`

    // -- readers --------------------------------------------------------------------------------

    // Register `reader`. Until `ends`, the storages that it reads are not evicted.
    void begins(Reader& reader);

    void ends(Reader& reader) noexcept { readers_.remove(reader); }

    // The program's own functions read `storages` from now on, until `end_reading` is called with
    // the number that this function returns. If `saved`, they may also read any value that autograd
    // saved.
    std::int64_t begin_reading(const StorageList& storages, bool saved);
    void end_reading(std::int64_t number);

    // -- eviction -------------------------------------------------------------------------------

    // Return true if a scope is active in which user-held values may be evicted.
    bool evicts() const noexcept { return !resorts_.empty(); }

    void stop_evicting_held() override;
    void go_on() override;
    // Restore `storage_impl` and keep it in memory while the program holds it. The program is about
    // to take its address, and code that uses the address cannot trigger a recomputation.
    void pin_exposed_address(c10::StorageImpl& storage_impl);
    // Exclude the value of `record`, which is in memory, from eviction while the program holds it.
    void pin_while_held(StorageRecord& record);
    // At the end of the budget, restore every user-held value that is evicted.
    void bring_all_back();

private:
    friend class EvictHeldLast;

    std::vector<Ref<Storage>> select_held();
    bool note_all_read(StorageList& read) const;
    static bool is_evictable(const StorageRecord& record, const StorageList& read, bool but_saved);
    std::exception_ptr restore_all_placeholders();
    void use_in_any_case(StorageRecord& record);
    void forget_recipes();

    Engine& engine_;
    Registry& registry_;
    Frees& frees_;
    Room& room_;
    Readers readers_;
    // Reads of tensors that Python code and the program's own functions announced, so that the
    // tensors are not evicted meanwhile. Python ends a read by its key.
    std::map<std::int64_t, std::unique_ptr<Reading>> noted_;
    std::int64_t notes_ = 0;               // key of the last read in `noted_`
    std::vector<EvictHeldLast*> resorts_;  // active scopes in which user-held values may be evicted
};

// Scope in which user-held values may be evicted, except those that are being read. The scope must
// end while its thread still holds the session mutex, and before the budget's state is destroyed.
class EvictHeldLast final {
public:
    explicit EvictHeldLast(Held& held);
    EvictHeldLast(const EvictHeldLast&) = delete;
    EvictHeldLast& operator=(const EvictHeldLast&) = delete;
    EvictHeldLast(EvictHeldLast&&) = delete;
    EvictHeldLast& operator=(EvictHeldLast&&) = delete;
    ~EvictHeldLast();

    // Make user-held values candidates for eviction again, except those that are being read. Called
    // after an operator that may read any user-held value.
    void go_on();

private:
    Held& held_;
    std::vector<Ref<Storage>> candidates_;
};

// Scope in which the storages in `storages` are being read, so that they are not evicted. The
// session mutex is held where the scope begins and where it ends.
class Reading final : public Reader {
public:
    // saved: true if values that autograd saved may be read as well.
    Reading(Held& held, StorageList storages, bool saved = false);
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    Reading(Reading&&) = delete;
    Reading& operator=(Reading&&) = delete;
    ~Reading() override;

    void note_read(StorageList& read) const override {
        read.append(storages_.begin(), storages_.end());
    }

    bool reads_saved() const override { return saved_; }

private:
    Held& held_;
    const StorageList storages_;
    const bool saved_;
};

}  // namespace rekindle
