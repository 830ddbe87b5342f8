// Records the events of a program within a budget, for Python to build traces and records from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../engine/journal.h"

namespace rekindle {

// The recording of a part of a run, or of all of it.
struct Transcript final {
    struct Present final {  // a storage that existed at the start
        std::int64_t id;
        Bytes nbytes;
        std::int64_t references;
        std::int64_t held;
    };

    struct Named final {  // a call; in the order of the entries
        const char* name;
        bool backward;
        Bytes workspace;
        StorageId over;  // that its result would take over, did that die; negative: none
    };

    std::vector<Present> present;
    std::vector<Present> counted;
    std::vector<Entry> entries;
    std::vector<Named> calls;
    // For a step: the number of entries before each of its operators.
    std::vector<std::int64_t> places;
    // Start of this recording in the journal and in the list of calls that all recordings share.
    std::size_t first_entry = 0;
    std::size_t first_call = 0;
};

// Records for all active recordings; each event is stored once.
class Transcriber final {
public:
    explicit Transcriber(Journal& journal) : journal_(journal) {}

    Transcriber(const Transcriber&) = delete;
    Transcriber& operator=(const Transcriber&) = delete;
    Transcriber(Transcriber&&) = delete;
    Transcriber& operator=(Transcriber&&) = delete;
    ~Transcriber() = default;

    bool writes() const noexcept { return begun_ != 0; }

    void begin(Transcript& transcript);

    // Note that the result of the call that is admitted next could take over `storage`.
    void would_take_over(StorageId storage) noexcept { over_ = storage; }

    // Note the name of the call that is admitted next.
    void called(const char* name, Bytes workspace);
    // Copy the events since its start into `transcript`. Return false if the journal ran out of
    // memory.
    bool notify(Transcript& transcript) const;
    // End one recording.
    void end() noexcept;

private:
    Journal& journal_;
    std::vector<Transcript::Named> calls_;
    std::size_t begun_ = 0;
    StorageId over_ = NONE;
    static constexpr StorageId NONE = -1;
};

}  // namespace rekindle
