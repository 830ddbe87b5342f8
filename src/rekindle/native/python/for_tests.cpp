// Functions of the Python module that only tests call, to inspect the native core or to make it
// fail.
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../allocator/counting_allocator.h"
#include "../base/clock.h"
#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../memory/notify.h"
#include "../memory/records/unwritten_bytes.h"
#include "../memory/room/neighbors.h"
#include "../memory/room/swapper.h"
#include "../ops/signature.h"
#include "../ops/workspaces.h"
#include "../steps/learner.h"
#include "../torch/rng_history.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Evict all values that may be evicted.
void evict_all(Session& session) {
    Locked lock;
    session.frees.process_pending();
    about_to_let_go(session, lock);
    session.room.evict_all();
    with_held_evictable(session, lock, [&] { session.room.evict_all(); });
}

// Return the number of threads that have opened the session mutex to run user code.
std::size_t openings() {
    const Locked lock;
    return the_mutex().openings();
}

// Set the longest permitted chain of recipes, each of which reads the result of the previous one.
void longest_chain(Session& session, std::int64_t calls) {
    const Locked lock;
    session.history.longest_chain = static_cast<int>(calls);
    session.history.next_check = static_cast<int>(calls);
}

// Only count the next `operators` operators, also if memory is not far below the budget.
void count_only(Session& session, std::int64_t operators) {
    const Locked lock;
    session.events.only_counting.begin_for(operators);
}

// Return True if operators are only counted now.
bool counts_only(const Session& session) {
    return session.events.only_counting.on();
}

// Start to list recomputed operators for `recomputed_ops`.
void list_recomputed_ops(Session& session) {
    const Locked lock;
    session.events.tests.list_recomputed_ops = true;
}

// Return the names of the operators that were recomputed since `list_recomputed_ops`.
PyObject* recomputed_ops(const Session& session) {
    std::vector<const Facts*> found;
    {
        const Locked lock;
        found = session.events.tests.recomputed_ops;
    }
    return list_of(found, [](const Facts* facts) {
        return PyUnicode_FromString(facts->name.c_str());
    });
}

// Return the number of operators that are running, and the bytes of their results and workspaces.
std::array<std::int64_t, 2> in_flight(const Session& session) {
    std::array<std::int64_t, 2> found{};
    {
        const Locked lock;
        found = {session.in_progress.operators, session.engine.in_flight};
    }
    return found;
}

// Return True if this thread has the session mutex.
bool has_lock() {
    return the_mutex().mine();
}

// Disable one feature, so that a test can show that it fails without this feature. Features of the
// device: "in_order", "readers_wait", "writers_wait", "keep_until_read", "may_differ", "kept_back",
// "find_place", "cheapest_neighbors". Features of workspaces: "took", "guess". "fitted": lower the
// budget after a device OOM. "ahead": copy values to the host before room is needed. "in_place":
// write results over gradients.
void disable_for_tests(Session& session, const char* name) {
    const std::string_view what = name;
    const Locked lock;
    session.room.backoff.lowers = session.room.backoff.lowers && what != "fitted";
    if (session.events.swapper) {
        session.events.swapper->ahead = session.events.swapper->ahead && what != "ahead";
    }
    session.taking_over.allowed = session.taking_over.allowed && what != "in_place";
    Device& device = session.device;
    device.learns = device.learns && what != "took";
    device.guesses = device.guesses && what != "guess";
    device.orders = device.orders && what != "in_order";
    device.orders_readers = device.orders_readers && what != "in_order" && what != "readers_wait";
    device.orders_writers = device.orders_writers && what != "in_order" && what != "writers_wait";
    device.keeps = device.keeps && what != "keep_until_read";
    device.doubts = device.doubts && what != "may_differ";
    device.keeps_back = device.keeps_back && what != "kept_back";
    device.finds_places = device.finds_places && what != "find_place";
    device.has_neighbors = device.has_neighbors && what != "cheapest_neighbors";
}

// Return the number of operator calls whose result was written over a gradient. Also return the
// smallest reference count of any gradient whose storage had no other owner.
PyObject* in_place(const Session& session) {
    Session::TakingOver count;
    {
        const Locked lock;
        count = session.taking_over;
    }
    const bool any = count.fewest != std::numeric_limits<std::int64_t>::max();
    const Object fewest(any ? PyLong_FromLongLong(count.fewest) : nothing());
    return Py_BuildValue("LO", static_cast<long long>(count.taken_over), fewest.get());
}

// Return the bytes that a failed allocation requested, read from its error message `text`.
std::int64_t bytes_asked_for(const char* text) {
    return asked_for(std::string_view(text));
}

// Find the adjacent blocks of memory that are cheapest to evict to free `nbytes`. Return their
// cost, and the indices of the first and the last block. `blocks`: list of (address, bytes, used,
// loss or None).
PyObject* window(PyObject* list, std::int64_t nbytes) {
    const Object rows(PySequence_Fast(list, "blocks: a list"));
    std::vector<Block> blocks;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(rows.get()); ++i) {
        long long address = 0;
        long long size = 0;
        int used = 0;
        PyObject* loss = nullptr;
        PyObject* row = PySequence_Fast_GET_ITEM(rows.get(), i);
        parse(row, "LLpO", &address, &size, &used, &loss);
        Block& block = blocks.emplace_back(address, size, used != 0, std::nullopt);
        if (loss != Py_None) {
            block.loss = PyFloat_AsDouble(loss);
        }
    }
    const std::optional<Window> found = cheapest_window(blocks, nbytes);
    if (!found) {
        return nothing();
    }
    const auto first = static_cast<Py_ssize_t>(found->first);
    return Py_BuildValue("dnn", found->loss, first, static_cast<Py_ssize_t>(found->last));
}

// Lower the budget as the runtime does after a device OOM, as if only `nbytes` had fit.
void fitted(Session& session, std::int64_t nbytes) {
    const Locked lock;
    session.room.backoff.fitted(nbytes, session.engine.budget);
}

// Let `replays` recomputations succeed, and raise an error in the next recomputation. `before`:
// raise it before the kernel runs, not after.
void interrupt(Session& session, std::int64_t replays, bool before) {
    const Locked lock;
    session.events.tests.interrupt_in = static_cast<int>(replays);
    session.events.tests.interrupt_before = before;
}

// Let `operators` more operators run, and raise `OutOfBudget` in the next one. Negative: never
// raise it. Return how many operators were left from the previous call.
std::int64_t refuse(Session& session, std::int64_t operators) {
    const Locked lock;
    return std::exchange(session.events.tests.refuse_in, operators);
}

// Return how many calls of this process had larger results than `most_bytes` says.
std::int64_t underestimated() {
    const Locked lock;
    return TestHooks::underestimated;
}

// Use `ns` as the cost of every operator. Negative: measure costs again.
void fix_costs(std::int64_t ns) {
    const Locked lock;
    rekindle::fix_costs(ns);
    forget_workspaces();
}

// Multiply all durations that the core measures from now on; see `set_clock_speed` in base/clock.h.
void set_clock_speed(double factor, std::int64_t seed) {
    rekindle::set_clock_speed(factor, seed);
}

// Start to keep the last `entries` entries of the engine's journal of events.
void open_journal(Session& session, std::int64_t entries) {
    const Locked lock;
    session.engine.journal.open(static_cast<std::size_t>(entries));
}

// Return the entries of the engine's journal of events, the oldest first.
PyObject* journal(const Session& session) {
    std::vector<Entry> entries;
    {
        const Locked lock;
        session.engine.journal.each([&](const Entry& entry) { entries.push_back(entry); });
    }
    return list_of(entries, [](const Entry& each) {
        const auto kind = static_cast<std::int64_t>(each.kind);
        return tuple_of(
            std::array<std::int64_t, 6>{
                kind, each.id, each.number, each.flags, each.clock, each.memory
            }
        );
    });
}

// Return the number of operators that the `Learner` has recorded in the running step.
std::size_t remembered(const Session& session) {
    const Locked lock;
    return learner_of(session)->remembered();
}

// Set the most operators of a step that may still follow a learned plan.
void remember_at_most(const Session& session, std::int64_t operators) {
    const Locked lock;
    learner_of(session)->longest = static_cast<std::size_t>(operators);
}

// Return for each operator of `step` what `SequenceMatcher::observe` finds for it in `shape`.
PyObject* places_in(PyObject* shape, PyObject* step) {
    const std::vector<std::int64_t> recorded = numbers_in(shape);
    SequenceMatcher walk(recorded);
    return list_of(numbers_in(step), [&](const std::int64_t op_id) {
        return PyLong_FromLongLong(walk.observe(op_id));
    });
}

// Return a byte of 1 for each unwritten byte of a storage made by `empty`, else 0. None: too many
// boxes were left. `writes`: tuples of the tensor that an operator wrote, and the tensor in the
// same storage that it copied, or None.
PyObject* unwritten_bytes(std::int64_t nbytes, PyObject* list) {
    UnwrittenBytes unwritten(nbytes);
    const Object each(PySequence_Fast(list, "writes: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        PyObject* written = nullptr;
        PyObject* copied = nullptr;
        parse(PySequence_Fast_GET_ITEM(each.get(), i), "OO", &written, &copied);
        const ByteRegion target = ByteRegion::of(tensor_of(written));
        if (copied == Py_None) {
            if (!unwritten.write(target)) {
                return nothing();
            }
            continue;
        }
        const ByteRegion source = ByteRegion::of(tensor_of(copied));
        TORCH_CHECK(unwritten.can_copy(target, source), "no box describes the copied bytes");
        if (!unwritten.copy(target, source)) {
            return nothing();
        }
    }
    std::string found;
    for (Bytes offset = 0; offset < nbytes; ++offset) {
        ByteRegion byte;
        byte.offset = offset;
        found.push_back(unwritten.overlaps(byte) ? '\1' : '\0');
    }
    return PyBytes_FromStringAndSize(found.data(), static_cast<Py_ssize_t>(found.size()));
}

// Start or stop counting the bytes that PyTorch's CPU allocator has allocated.
void tally(bool tallies) {
    TORCH_CHECK(allocations_are_counted(), "write count_allocations() before tally(True)");
    tally_allocations(tallies);
}

// Return the bytes that the CPU allocator has allocated since `tally` and not freed. Also return
// their peak since the last call of this function.
PyObject* tallied() {
    const GivenOutInside given = tallied_allocations();
    return Py_BuildValue(
        "LL", static_cast<long long>(given.now), static_cast<long long>(given.most)
    );
}

}  // namespace

}  // namespace functions

PyMethodDef* test_methods() {
    static std::array all{
        method<functions::evict_all>("evict_all"),
        method<functions::longest_chain>("longest_chain"),
        method<functions::count_only>("count_only"),
        method<functions::counts_only>("counts_only"),
        method<functions::list_recomputed_ops>("list_recomputed_ops"),
        method<functions::recomputed_ops>("recomputed_ops"),
        method<functions::has_lock>("has_lock"),
        method<functions::openings>("openings"),
        method<functions::in_flight>("in_flight"),
        method<functions::bytes_asked_for>("bytes_asked_for"),
        method<functions::window>("window"),
        method<functions::disable_for_tests>("disable_for_tests"),
        method<functions::in_place>("in_place"),
        method<functions::fitted>("fitted"),
        method<functions::interrupt>("interrupt"),
        method<functions::refuse>("refuse"),
        method<functions::underestimated>("underestimated"),
        method<functions::fix_costs>("fix_costs"),
        method<functions::set_clock_speed>("set_clock_speed"),
        method<functions::open_journal>("open_journal"),
        method<functions::journal>("journal"),
        method<functions::remembered>("remembered"),
        method<functions::remember_at_most>("remember_at_most"),
        method<functions::tally>("tally"),
        method<functions::tallied>("tallied"),
        method<functions::places_in>("places_in"),
        method<functions::unwritten_bytes>("unwritten_bytes"),
        method<rekindle::set_flag<
            &Session::events,
            &Events::tests,
            &rekindle::TestHooks::evict_before_every_op>>("evict_before_every_op"),
        method<rekindle::bytes_of_positions>("bytes_of_positions"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
