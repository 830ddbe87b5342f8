#include "transcript.h"

#include <cstdint>
#include <span>
#include <utility>

#include "../../torch/backward.h"

namespace rekindle {

void Transcriber::begin(Transcript& transcript) {
    if (begun_ == 0) {
        engine_->journal.open_whole();
    }
    ++begun_;
    transcript.first_entry = engine_->journal.written();
    transcript.first_call = calls_.size();
}

void Transcriber::freed(const void* address, Bytes nbytes) noexcept {
    if (writes()) {
        const auto id = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
        const Entry::Kind kind = Entry::Kind::uncounted;
        engine_->journal.write({kind, id, nbytes, 0, engine_->clock, engine_->memory});
    }
}

void Transcriber::called(const char* name, Bytes workspace) {
    calls_.push_back({name, in_backward_pass(), workspace, std::exchange(over_, NONE)});
}

bool Transcriber::notify(Transcript& transcript) const {
    const std::span<const Entry> written = engine_->journal.whole();
    if (written.size() < engine_->journal.written()) {
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
        engine_->journal.close();
        calls_ = {};
    }
}

}  // namespace rekindle
