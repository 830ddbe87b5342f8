#include "recording.h"

#include <algorithm>
#include <cstdint>
#include <functional>

namespace rekindle {

void start_recording(Session& session, Transcript& transcript) {
    session.events.only_counting.end();  // a trace has every operator
    session.frees.poll();
    for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        const std::int64_t held = each->held ? 1 : 0;
        transcript.present.push_back({each->id, each->nbytes, each->references, held});
    }
    session.registry.table.each_counted([&](const void* address, const AddressEntry& counted) {
        const auto id = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
        transcript.counted.push_back({id, counted.nbytes, 0, 1});
    });
    // Sort storages by size. Their addresses differ from run to run, and equal runs must give equal
    // traces.
    std::ranges::sort(transcript.counted, std::less(), &Transcript::Present::nbytes);
    session.observers.transcriber.begin(transcript);
}

}  // namespace rekindle
