// What a program does within a budget, written down event by event, for Python to make traces and
// records of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../engine/journal.h"

namespace rekindle {

// A part of a run, or all of it.
struct Transcript final {
    struct Present final {  // in the graph when it began, or only counted
        std::int64_t id;
        Bytes nbytes;
        std::int64_t references;
        std::int64_t held;
    };

    struct Named final {  // a call, in the order of the entries
        const char* name;
        bool backward;
        Bytes workspace;
    };

    std::vector<Present> present;
    std::vector<Present> counted;
    std::vector<Entry> entries;
    std::vector<Named> calls;
    // Of a step, for each operator that was met how many entries came before.
    std::vector<std::int64_t> places;
    // Where it begins in what is written for all.
    std::size_t first_entry = 0;
    std::size_t first_call = 0;
};

// Writes for all transcripts that were begun and are not over: an event once.
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
    // The call that is admitted next.
    void called(const char* name, Bytes workspace);
    // What happened since it began is in `transcript`. Returns whether there was memory for it.
    bool tell(Transcript& transcript) const;
    // `transcript` is over.
    void end() noexcept;

private:
    Journal& journal_;
    std::vector<Transcript::Named> calls_;
    std::size_t begun_ = 0;
};

}  // namespace rekindle
