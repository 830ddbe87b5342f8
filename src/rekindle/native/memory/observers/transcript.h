// Records the events of a program within a budget. Python builds traces from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../engine/journal.h"
#include "../../engine/ledger.h"

namespace rekindle {

// The recording of a whole run, or of a part of it such as one training step. A trace is made from
// it.
struct Transcript final {
    struct Present final {  // a storage that existed when the recording of the trace started
        std::int64_t id;
        Bytes nbytes;
        std::int64_t references;
        std::int64_t held;
    };

    struct Named final {  // an operator call
        const char* name;
        bool backward;
        Bytes workspace;
        // Storage over which the result of the call could be written if nothing else used this
        // storage; negative: none.
        StorageId over;
    };

    // The storages at the start: those that the engine has, and those of which it only counts the
    // bytes.
    std::vector<Present> present;
    std::vector<Present> counted;
    // The events and the operator calls of this recording, once it has ended.
    std::vector<Entry> entries;
    std::vector<Named> calls;
    // If this is the recording of a training step: for each operator of the step, the number of
    // events recorded before it.
    std::vector<std::int64_t> places;
    // Index of the first event of this recording in the engine's journal, and of its first call in
    // the list of calls. All recordings share the journal and the list.
    std::size_t first_entry = 0;
    std::size_t first_call = 0;
};

// Writes events for all active recordings. Each event is stored once, however many recordings there
// are.
class Transcriber final {
public:
    Transcriber() = default;
    Transcriber(const Transcriber&) = delete;
    Transcriber& operator=(const Transcriber&) = delete;
    ~Transcriber() = default;

    // Record the events of `engine`. Called once, before any recording begins.
    void follow(Ledger& engine) noexcept { engine_ = &engine; }

    bool writes() const noexcept { return begun_ != 0; }

    void begin(Transcript& transcript);

    // Record that the result of the next operator call could be written over `storage`, as an
    // in-place backward operator does.
    void would_take_over(StorageId storage) noexcept { over_ = storage; }

    // Record the name and the workspace bytes of the next operator call.
    void called(const char* name, Bytes workspace);
    // Record that the storage at `address` was freed, of which only the bytes were counted.
    void freed(const void* address, Bytes nbytes) noexcept;
    // Copy the events since the start of the recording into `transcript`. Return false if the
    // engine's journal ran out of memory.
    bool notify(Transcript& transcript) const;
    // Record that one recording has ended, so that events need not be kept for it.
    void end() noexcept;

private:
    Ledger* engine_ = nullptr;
    std::vector<Transcript::Named> calls_;
    std::size_t begun_ = 0;
    StorageId over_ = NONE;
    static constexpr StorageId NONE = -1;
};

}  // namespace rekindle
