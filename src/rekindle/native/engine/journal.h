// Log of events and actions, for tests, explanations and learned plans. It keeps all entries, or
// the most recent ones in a ring. It costs nothing unless it is opened.
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

// One event or action. Several entries describe a call: its `reads`, `makes`, `views`, `overwrites`
// and `takes` come before the `call` or `admit` that they belong to.
struct Entry final {
    enum class Kind : std::int64_t {
        // Events. `id` is a storage, unless noted.
        reads,       // number: index of the value in the storage; the root is 0
        makes,       // number: bytes
        views,       // number: index of the value
        overwrites,  // number: storage whose memory it takes over
        takes,       // id: operator; number: bytes of its workspace, if it has one
        call,        // id: operator; number: cost; flags
        admit,       // as `call`
        use,         // number: index of the value
        pin,         // number: index of the value
        retain,
        release,
        drop,
        gone,
        forget,
        seal,
        spoil,
        account,     // id: cost; number: bytes; flags: bytes of a workspace
        resize,      // number: bytes
        require,     // number: which value
        make_room,   // id: none; number: bytes
        shrink,      // as `make_room`
        evict,       // exactly this storage
        let_return,  // flags: 0 no, 1 yes, 2 last
        lock,
        unlock,
        mark,    // the plan does not need it for now
        unmark,  //
        clear,   // all marks
        listen,
        uncounted,  // memory outside any storage, of a driver whose run is recorded; number: bytes
        // Events of copies on the host. Entries with flags may be part of another event.
        ahead,
        prefetch,         // number: bytes
        discards,         //
        measured,         // id, number: bytes per second out and in; 0: unchanged; flags
        swap_out_failed,  // flags
        swap_in_failed,   // flags
        copy_lost,        // flags
        // Actions.
        compute,  // id: operator; flags: in place
        free,
        swap_out,  // flags: whether it also stays resident
        swap_in,
        discard,
    };

    static constexpr std::int64_t REPLAYABLE = 1;
    static constexpr std::int64_t HELD = 2;
    static constexpr std::int64_t KEPT = 1;
    static constexpr std::int64_t NESTED = 1;  // Part of another event.

    Kind kind;
    std::int64_t id;
    std::int64_t number;
    std::int64_t flags;
    Nanoseconds clock;
    Bytes memory;
};

class Journal final {
public:
    // Keep the last `length` entries from now on; 0 closes the journal.
    void open(std::size_t length) {
        entries_.clear();
        entries_.reserve(length);
        length_ = length;
        written_ = 0;
    }

    // Keep all entries from now on.
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
            return;  // Out of memory. `whole` notices that entries are missing.
        }
        if (entries_.size() < length_) {
            entries_.push_back(entry);  // Within the reserved capacity, so this does not throw.
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
