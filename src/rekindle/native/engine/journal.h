// What came in and what went out, one after the other, for tests and explanations: a ring of plain
// records that forgets the oldest. Off, and free, unless it is opened.
#pragma once

#include <cstddef>
#include <cstdint>
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
        account,     // id: cost; number: bytes
        resize,      // number: bytes
        require,     // number: which value
        make_room,   // id: none; number: bytes
        shrink,      // likewise
        let_return,  // flags: 0 no, 1 yes, 2 last
        lock,
        unlock,
        mark,    // what advice has done with
        unmark,  //
        clear,   // of all marks
        listen,
        // actions
        compute,  // id: the operator; flags: in place
        free,
    };

    static constexpr std::int64_t REPLAYABLE = 1;
    static constexpr std::int64_t HELD = 2;

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

    bool is_open() const noexcept { return length_ != 0; }

    std::size_t written() const noexcept { return written_; }

    void write(const Entry& entry) noexcept {
        if (entries_.size() < length_) {
            entries_.push_back(entry);  // within what was reserved
        } else {
            entries_[written_ % length_] = entry;
        }
        ++written_;
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
    std::vector<Entry> entries_;
    std::size_t length_ = 0;
    std::size_t written_ = 0;
};

}  // namespace rekindle
