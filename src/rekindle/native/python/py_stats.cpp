#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../base/mutex.h"
#include "../dispatch/trial.h"
#include "../memory/observers/audit.h"
#include "../memory/session.h"
#include "../memory/take_snapshot.h"
#include "../ops/slicing.h"
#include "../ops/workspaces.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Return thirteen numbers, in this order:
//
//  1. memory: bytes that count against the budget now
//  2. peak: the most such bytes so far
//  3. clock: the engine's time in ns, the sum of the costs of all operators that ran
//  4. compute_ns: cost of operators that the program ran
//  5. recompute_ns: cost of recomputed operators; also what slices compute more than once
//  6. lost_ns: time that choosing, evicting and recomputing took
//  7. evictions: number of evicted storages
//  8. recomputations: number of recomputed operators
//  9. bytes that count but belong to no storage of the graph
// 10. number of storages in the graph of the engine
// 11. number of records and recipes
// 12. bytes of the runtime's own bookkeeping
// 13. how often other code had cleared the dispatch key of a thread
std::array<std::int64_t, 13> numbers(Session& session) {
    std::array<std::int64_t, 13> found{};
    {
        const Locked lock;
        session.frees.process_pending();
        session.registry.poll_untracked();
        session.frees.process_pending();
        const Engine& engine = session.engine;
        const SlicedRuns& slices = session.observers.sliced_runs;
        found = {
            engine.memory,
            engine.peak,
            engine.clock,
            engine.compute_ns + slices.compute_ns(),
            engine.recompute_ns + slices.recompute_ns(),
            session.observers.lost.total() + slices.recompute_ns(),
            session.observers.evictions,
            session.observers.recomputations,
            engine.unlisted,
            static_cast<std::int64_t>(engine.n_storages()),
            static_cast<std::int64_t>(session.registry.records.alive()),
            static_cast<std::int64_t>(session.bytes_of_bookkeeping()),
            session.rejoined.load(),
        };
    }
    return found;
}

// Measured cost and workspace of one operator signature, to pass to Python.
struct SignatureFigures final {
    const Facts* facts;
    std::vector<std::vector<std::int64_t>> sizes;
    Nanoseconds cost;
    Bytes workspace;
};

// Return the signatures with a measured cost or workspace. Needs the session mutex.
std::vector<SignatureFigures> measured_signatures() {
    std::vector<SignatureFigures> found;
    for (const Signature* each : all_signatures()) {
        if (each->watched == 0 && each->cost == 0) {
            continue;
        }
        found.push_back({&each->facts, {}, each->cost, each->workspace});
        for (const Geometry& geometry : each->geometries) {
            found.back().sizes.emplace_back(geometry.sizes.begin(), geometry.sizes.end());
        }
    }
    return found;
}

// Return the operator signatures with a measured cost or workspace. `sizes`: sizes of the tensor
// arguments.
PyObject* signatures_seen() {
    std::vector<SignatureFigures> found;
    {
        const Locked lock;
        found = measured_signatures();
    }
    return list_of(found, [](const SignatureFigures& each) {
        const Object sizes(PyTuple_New(static_cast<Py_ssize_t>(each.sizes.size())));
        for (std::size_t i = 0; i < each.sizes.size(); ++i) {
            PyTuple_SET_ITEM(
                sizes.get(), static_cast<Py_ssize_t>(i), rekindle::tuple_of(each.sizes[i])
            );
        }
        return Py_BuildValue(
            "sOLL",
            each.facts->name.c_str(),
            sizes.get(),
            static_cast<long long>(each.cost),
            static_cast<long long>(each.workspace)
        );
    });
}

// Replace the workspaces that earlier processes measured. `numbers`: the numbers of the operator
// signatures, which are the same in every process.
void remember_workspaces(PyObject* numbers, PyObject* workspaces) {
    const std::vector<std::int64_t> which = numbers_in(numbers);
    const std::vector<std::int64_t> measured = numbers_in(workspaces);
    NumberedWorkspaces all;
    for (std::size_t i = 0; i < std::min(which.size(), measured.size()); ++i) {
        all.emplace_back(which[i], measured[i]);
    }
    const Locked lock;
    rekindle::remember_workspaces(all);
}

// Return the workspaces that this process measured since the last call of this function.
PyObject* take_new_workspaces() {
    NumberedWorkspaces found;
    {
        const Locked lock;
        found = rekindle::take_new_workspaces();
    }
    return list_of(found, [](const auto& each) {
        const auto& [number, workspace] = each;
        return rekindle::tuple_of(std::array<std::int64_t, 2>{number, workspace});
    });
}

// Return how often an operator was called again because the budget refused memory to its first
// call.
std::int64_t repeated_calls(const Session& session) {
    const Locked lock;
    return session.observers.repeated_calls;
}

// Return True if `nbytes` more would fit into the budget after evicting all values that may be
// evicted.
bool has_room(const Session& session, std::int64_t bytes) {
    const Locked lock;
    return session.engine.has_room(bytes + session.room.kept_back(bytes));
}

// Return the names of the devices whose memory the program has used so far.
PyObject* devices_used(const Session& session) {
    std::vector<c10::Device> found;
    {
        const Locked lock;
        found = session.registry.devices.used();
    }
    return list_of(found, [](const c10::Device& each) {
        return PyUnicode_FromString(each.str().c_str());
    });
}

// Set the peak of memory that reports show to `nbytes`.
void set_peak(Session& session, std::int64_t peak) {
    const Locked lock;
    session.engine.peak = peak;
}

// Return the bytes of evicted values that the program or autograd still refers to.
std::int64_t evicted_bytes(const Session& session) {
    const Locked lock;
    return rekindle::evicted_bytes(session);
}

// Return the operators whose results are never evicted, because a trial (a second run) showed that
// recomputing them is not safe. `why`: what the trial showed.
PyObject* kept(const Session& session) {
    std::vector<KeptCalls> found;
    {
        const Locked lock;
        found = session.observers.kept_calls.groups();
    }
    return list_of(found, [](const KeptCalls& each) {
        return Py_BuildValue(
            "ssLL",
            each.facts->name.c_str(),
            each.why.c_str(),
            static_cast<long long>(each.calls),
            static_cast<long long>(each.nbytes)
        );
    });
}

// Return the operators that ran in slices: name, number of calls, most slices of a call, time (ns).
PyObject* sliced(const Session& session) {
    std::vector<SlicedRun> found;
    {
        const Locked lock;
        found = session.observers.sliced_runs.groups();
    }
    return list_of(found, [](const SlicedRun& each) {
        return Py_BuildValue(
            "sLLL",
            each.facts->name.c_str(),
            static_cast<long long>(each.calls),
            static_cast<long long>(each.slices),
            static_cast<long long>(each.time)
        );
    });
}

// Return the names of the operators that may run in slices, among those that have run in this
// process. A name stands several times in the list if there are several signatures. The budget may
// have ended.
PyObject* sliceable(const Session& session) {
    std::vector<const char*> found;
    {
        const Locked lock;
        for (const Signature* each : all_signatures()) {
            if (session.slices && has_slices(each->facts, each->op)) {
                found.push_back(each->facts.name.c_str());
            }
        }
    }
    return list_of(found, PyUnicode_FromString);
}

// Let operators be tried again whose results are kept because of a trial.
void reopen_trials() {
    const Locked lock;
    retry_kept_signatures();
}

// Return the outcome of trial recomputations of the last autograd.Function whose forward this
// thread ran as one operator (a unit). `trusted`: its results may be recomputed. `why`: the reason
// why its results are never evicted, else "".
PyObject* last_unit() {
    const Probation& known = rekindle::last_unit();
    const Object trusted(PyBool_FromLong(known.is_trusted() ? 1 : 0));
    return Py_BuildValue("Os", trusted.get(), known.why().c_str());
}

// Start to compare recomputed values with the values that the operators first computed.
void audit(Session& session) {
    const Locked lock;
    session.observers.audit = std::make_unique<Audit>();
}

// Return the operator calls whose recomputed results differed from their first results.
PyObject* recomputed_differently(const Session& session) {
    std::vector<Audit::Difference> found;
    {
        const Locked lock;
        if (session.observers.audit) {
            found = session.observers.audit->different();
        }
    }
    return list_of(found, [](const Audit::Difference& each) {
        const auto op = static_cast<long long>(each.op);
        return Py_BuildValue("sL", each.facts->name.c_str(), op);
    });
}

}  // namespace

}  // namespace functions

PyMethodDef* stats_methods() {
    static std::array all{
        method<functions::numbers>("numbers"),
        method<functions::has_room>("has_room"),
        method<functions::devices_used>("devices_used"),
        method<functions::set_peak>("set_peak"),
        method<functions::evicted_bytes>("evicted_bytes"),
        method<functions::kept>("kept"),
        method<functions::sliced>("sliced"),
        method<functions::sliceable>("sliceable"),
        method<functions::last_unit>("last_unit"),
        method<functions::reopen_trials>("reopen_trials"),
        method<functions::audit>("audit"),
        method<functions::recomputed_differently>("recomputed_differently"),
        method<functions::signatures_seen>("signatures_seen"),
        method<functions::remember_workspaces>("remember_workspaces"),
        method<functions::take_new_workspaces>("take_new_workspaces"),
        method<functions::repeated_calls>("repeated_calls"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
