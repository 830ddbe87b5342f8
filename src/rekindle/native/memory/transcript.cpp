#include "transcript.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "../torch/backward.h"
#include "driver.h"

namespace rekindle {

void Transcriber::begin(Transcript& transcript) {
    if (begun_ == 0) {
        journal_.open_whole();
    }
    ++begun_;
    transcript.first_entry = journal_.written();
    transcript.first_call = calls_.size();
}

void Transcriber::called(const char* name, Bytes workspace) {
    calls_.push_back({name, in_backward_pass(), workspace, std::exchange(over_, NONE)});
}

bool Transcriber::notify(Transcript& transcript) const {
    const std::span<const Entry> written = journal_.whole();
    if (written.size() < journal_.written()) {
        return false;
    }
    const std::span<const Entry> entries = written.subspan(transcript.first_entry);
    const auto calls = std::span(calls_).subspan(transcript.first_call);
    transcript.entries.assign(entries.begin(), entries.end());
    transcript.calls.assign(calls.begin(), calls.end());
    return true;
}

void Transcriber::end() noexcept {
    if (--begun_ == 0) {
        journal_.close();
        calls_ = {};
    }
}

void Driver::begin(Transcript& transcript) {
    only_counting.end();  // a trace has every operator
    poll();
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const std::int64_t held = each->held ? 1 : 0;
        transcript.present.push_back({each->id, each->nbytes, each->references, held});
    }
    each_counted([&](const void* address, const AddressEntry& counted) {
        const auto id = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
        transcript.counted.push_back({id, counted.nbytes, 0, 1});
    });
    // Sort storages by size. Their addresses differ from run to run, and equal runs must give equal
    // traces.
    std::ranges::sort(transcript.counted, std::less(), &Transcript::Present::nbytes);
    transcriber.begin(transcript);
}

}  // namespace rekindle
