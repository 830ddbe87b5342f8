// What came in and what went out, one after the other, for tests, explanations and learners: plain
// records, all of them or a ring that forgets the oldest. Off, and free, unless it is opened.
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

// One event or action. A call with inputs, outputs and pairs is told by several: what `reads`,
// `makes`, `views`, `overwrites` and `takes` say belongs to the `call` or `admit` that follows.
struct Entry final {
    enum class Kind : std::int64_t {
        // events: `id` is a storage but for calls; `number` as said
        reads,       // number: which value of the storage, the root is 0
        makes,       // number: bytes
        views,       //
        overwrites,  // number: the storage whose memory it takes over
        takes,       // id: the operator; number: bytes of its workspace, if it has any
        call,        // id: the operator; number: cost; flags
        admit,       // likewise
        use,         // number: which value
        pin,         // number: which value
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
        shrink,      // likewise
        evict,       // just this one
        let_return,  // flags: 0 no, 1 yes, 2 last
        lock,
        unlock,
        mark,    // what advice has done with
        unmark,  //
        clear,   // of all marks
        listen,
        uncounted,  // memory in no storage, of a driver that is written down; number: bytes
        // events of copies on the host; what has flags may come amid another event
        ahead,
        prefetch,         // number: bytes
        discards,         //
        measured,         // id, number: bytes in a second out and in; 0: nothing new; flags
        swap_out_failed,  // flags
        swap_in_failed,   // flags
        copy_lost,        // flags
        // actions
        compute,  // id: the operator; flags: in place
        free,
        swap_out,  // flags: whether it also stays
        swap_in,
        discard,
    };

    static constexpr std::int64_t REPLAYABLE = 1;
    static constexpr std::int64_t HELD = 2;
    static constexpr std::int64_t KEPT = 1;
    static constexpr std::int64_t AMID = 1;  // another event

    Kind kind;
    std::int64_t id;
    std::int64_t number;
    std::int64_t flags;
    Nanoseconds clock;
    Bytes memory;
};

class Journal final {
public:
    // Keeps the last `length` entries from now on; 0: none.
    void open(std::size_t length) {
        entries_.clear();
        entries_.reserve(length);
        length_ = length;
        written_ = 0;
    }

    // Keeps all entries from now on.
    void open_whole() {
        open(0);
        length_ = ALL;
    }

    void close() noexcept {
        length_ = written_ = 0;
        entries_ = {};
    }

    // All that was written since `open_whole`; nothing if memory was too short for that.
    std::span<const Entry> whole() const noexcept {
        return written_ == entries_.size() ? entries_ : std::span<const Entry>();
    }

    bool is_open() const noexcept { return length_ != 0; }

    std::size_t written() const noexcept { return written_; }

    void write(const Entry& entry) noexcept {
        const std::size_t place = written_++;
        if (length_ == ALL && entries_.size() == entries_.capacity() && !grow()) {
            return;  // there is no memory for it: `take` will tell
        }
        if (entries_.size() < length_) {
            entries_.push_back(entry);  // within what was reserved
        } else {
            entries_[place % length_] = entry;
        }
    }

    // Those that are left, oldest first.
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
