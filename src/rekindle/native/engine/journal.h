// Log of the engine's events and actions, for tests, explanations and learned plans. It keeps all
// entries, or the most recent ones in a ring buffer. It costs nothing unless it is open.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// One event or action in the engine's log. An operator call is logged as several entries: first one
// entry for each storage that the call reads, makes, views or overwrites, and one for its workspace
// (`takes`); then the entry `call` or `admit`.
struct Entry final {
    enum class Kind : std::int64_t {
        // Events that the runtime or a test reports to the engine. The comment after each kind says
        // what the fields `id`, `number` and `flags` of such an entry mean. `id` is the number of a
        // storage, unless the comment says otherwise.
        reads,       // number: position of the value in its storage; the root is 0
        makes,       // number: bytes
        views,       // number: position of the value
        overwrites,  // number: storage whose memory `id` takes over
        takes,       // id: operator; number: bytes of workspace, if the operator has one
        call,        // id: operator; number: cost; flags: `REPLAYABLE`, `HELD`
        admit,       // as `call`
        defer,       // as `call`
        hold,
        use,  // number: position of the value
        pin,  // number: position of the value
        retain,
        release,
        drop,
        gone,
        forget,
        seal,
        spoil,
        account,    // id: cost; number: change of memory in bytes; flags: bytes of workspace
        resize,     // number: bytes
        require,    // number: position of the value
        make_room,  // id: none; number: bytes
        shrink,     // as `make_room`
        evict,      // evict exactly this storage (`Ledger::evict_these`)
        set_evictable_while_held,  // flags: 0 not while held, 1 while held, 2 only as a last resort
        lock,
        unlock,
        mark,    // the plan does not need the storage for now
        unmark,  //
        clear,   // removes all marks
        listen,
        uncounted,  // change of the memory that belongs to no storage in the graph; number: bytes
        // Events that concern copies on the host. An entry with the flag `NESTED` was written while
        // the engine handled another event.
        ahead,
        prefetch,  // number: bytes
        planned,   // number: 1 if a plan decides from now on what to copy, 0 if the engine does
        save,
        fetch,
        discards,  //
        measured,  // id, number: bytes/s of swap-out and swap-in; 0: unchanged; flags: `NESTED`
        swap_out_failed,  // flags: `NESTED`
        swap_in_failed,   // flags: `NESTED`
        copy_lost,        // flags: `NESTED`
        written,
        outdated,  // the host copy of the next victim has old contents; flags: `NESTED`
        step,      // a step of the program has ended
        anticipate,
        // Actions that the engine takes. The comments say what the fields mean, as above.
        compute,  // id: operator; flags: 1 if in place
        free,
        swap_out,  // flags: `KEPT` if the storage also stays resident
        swap_in,
        discard,
    };

    static constexpr std::int64_t REPLAYABLE = 1;
    static constexpr std::int64_t HELD = 2;
    static constexpr std::int64_t KEPT = 1;
    // the entry was written while the engine handled another event
    static constexpr std::int64_t NESTED = 1;

    Kind kind;
    std::int64_t id;
    std::int64_t number;
    std::int64_t flags;
    Nanoseconds clock;
    Bytes memory;
};

class Journal final {
public:
    // Keep the last `length` entries of the log from now on; 0 closes the log.
    void open(std::size_t length) {
        entries_.clear();
        entries_.reserve(length);
        length_ = length;
        written_ = 0;
    }

    // Keep all entries of the log from now on, without a limit.
    void open_whole() {
        open(0);
        length_ = ALL;
    }

    void close() noexcept {
        length_ = written_ = 0;
        entries_ = {};
    }

    // Return all entries since `open_whole`; none if memory ran out.
    std::span<const Entry> whole() const noexcept {
        return written_ == entries_.size() ? entries_ : std::span<const Entry>();
    }

    bool is_open() const noexcept { return length_ != 0; }

    std::size_t written() const noexcept { return written_; }

    void write(const Entry& entry) noexcept {
        const std::size_t place = written_++;
        if (length_ == ALL && entries_.size() == entries_.capacity() && !grow()) {
            return;  // out of memory: drop the entry; `whole` notices that entries are missing
        }
        if (entries_.size() < length_) {
            // the vector has reserved this capacity, so the call does not throw
            entries_.push_back(entry);
        } else {
            entries_[place % length_] = entry;
        }
    }

    // Visit the kept entries, oldest first.
    template <class F>
    void each(F&& visit) const {
        const std::size_t first = written_ > entries_.size() ? written_ % length_ : 0;
        for (std::size_t i = 0; i < entries_.size(); ++i) {
            visit(entries_[(first + i) % entries_.size()]);
        }
    }

private:
    static constexpr std::size_t ALL = std::numeric_limits<std::size_t>::max();

    bool grow() noexcept {
        try {
            entries_.reserve(std::max<std::size_t>(1024, 2 * entries_.size()));
        } catch (const std::bad_alloc&) {
            return false;
        }
        return true;
    }

    std::vector<Entry> entries_;
    std::size_t length_ = 0;
    std::size_t written_ = 0;
};

}  // namespace rekindle
