#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/notify.h"
#include "../memory/observers/transcript.h"
#include "../memory/recording.h"
#include "methods.h"

namespace rekindle {

PyObject* words_of(const Transcript& transcript) {
    std::vector<std::int64_t> workspaces;
    std::vector<std::int64_t> backward;
    std::vector<std::int64_t> over;
    const Object names(PyList_New(0));
    for (const Transcript::Named& call : transcript.calls) {
        workspaces.push_back(call.workspace);
        backward.push_back(call.backward ? 1 : 0);
        over.push_back(call.over);
        const Object name(PyUnicode_FromString(call.name));
        must(PyList_Append(names.get(), name.get()) == 0);
    }
    return Py_BuildValue(
        "NNNNNNNO",
        bytes_of(std::span(transcript.present)),
        bytes_of(std::span(transcript.counted)),
        bytes_of(std::span(transcript.entries)),
        bytes_of(std::span(transcript.places)),
        bytes_of(std::span<const std::int64_t>(workspaces)),
        bytes_of(std::span<const std::int64_t>(backward)),
        bytes_of(std::span<const std::int64_t>(over)),
        names.get()
    );
}

namespace functions {

namespace {

// Process freed storages now, because a trace contains the time at which the program freed each
// value.
void process_frees(Session& session) {
    const Locked lock;
    session.frees.process_pending();
    session.frees.poll();
}

// Throw an error unless a recording is `complete`. A recording is incomplete if memory for its
// events ran out.
void check_written(bool complete) {
    TORCH_CHECK(complete, "there was no memory to record the events of the program");
}

// Start to record events, and return the number of the recording. `whole`: the recording covers the
// whole `rekindle.budget` block.
std::int64_t begin_recording(Session& session, bool whole) {
    const Locked lock;
    session.frees.process_pending();
    const auto& begun = session.observers.transcripts;
    const std::int64_t number = begun.empty() ? 0 : begun.rbegin()->first + 1;
    start_recording(session, session.observers.transcripts[number]);
    session.observers.recorded = session.observers.recorded || whole;
    return number;
}

// Return a recording: (present, counted, entries, places, workspaces, backward, over, names).
// `present` and `counted` are the storages at its start, with a record and without. `entries` are
// the events since its start. `places` has the number of entries before each operator of a step.
// The last four have one item per operator call. `workspaces` has bytes, `backward` has 1 in a
// backward pass, `over` has the storage that the result could be written over or -1, and `names`
// has operators. All but `names` are arrays of 64-bit words, as bytes; see
// memory/observers/transcript.h.
PyObject* recording(Session& session, std::int64_t number) {
    process_frees(session);
    Transcript copy;
    bool complete = false;
    {
        const Locked lock;
        copy = session.observers.transcripts.at(number);
        complete = session.observers.transcriber.notify(copy);
    }
    check_written(complete);
    return words_of(copy);
}

// End a recording, and return it as `recording` does.
PyObject* end_recording(Session& session, std::int64_t number) {
    process_frees(session);
    Transcript transcript;
    bool complete = false;
    {
        const Locked lock;
        transcript = std::move(session.observers.transcripts.at(number));
        session.observers.transcripts.erase(number);
        complete = session.observers.transcriber.notify(transcript);
        session.observers.transcriber.end();
    }
    check_written(complete);
    return words_of(transcript);
}

}  // namespace

}  // namespace functions

PyMethodDef* transcript_methods() {
    static std::array all{
        method<functions::begin_recording>("begin_recording"),
        method<functions::recording>("recording"),
        method<functions::end_recording>("end_recording"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
