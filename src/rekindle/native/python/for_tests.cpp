#include "for_tests.h"

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

namespace rekindle {

PyObject* evict_all(PyObject* arguments) {
    Session& session = session_in(arguments);
    translate_errors(session, [&] {
        Locked lock;
        session.frees.process_pending();
        about_to_let_go(session, lock);
        session.room.evict_all();
        with_held_evictable(session, lock, [&] { session.room.evict_all(); });
    });
    return nothing();
}

PyObject* openings(PyObject* /*arguments*/) {
    const Locked lock;
    return PyLong_FromSize_t(the_mutex().openings());
}

PyObject* bytes_of_positions(PyObject* /*arguments*/) {
    return PyLong_FromSize_t(bytes_of_positions());
}

PyObject* longest_chain(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int calls = 0;
    parse(arguments, "Oi", &capsule, &calls);
    const Locked lock;
    session_of(capsule).history.longest_chain = calls;
    session_of(capsule).history.next_check = calls;
    return nothing();
}

PyObject* count_only(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long operators = 0;
    parse(arguments, "OL", &capsule, &operators);
    const Locked lock;
    session_of(capsule).events.only_counting.begin_for(operators);
    return nothing();
}

PyObject* counts_only(PyObject* arguments) {
    return PyBool_FromLong(session_in(arguments).events.only_counting.on() ? 1 : 0);
}

PyObject* list_recomputed_ops(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.events.tests.list_recomputed_ops = true;
    return nothing();
}

PyObject* recomputed_ops(PyObject* arguments) {
    const Session& session = session_in(arguments);
    std::vector<const Facts*> found;
    {
        const Locked lock;
        found = session.events.tests.recomputed_ops;
    }
    Object list(PyList_New(0));
    for (const Facts* facts : found) {
        const Object name(PyUnicode_FromString(facts->name.c_str()));
        must(PyList_Append(list.get(), name.get()) == 0);
    }
    return list.give();
}

PyObject* in_flight(PyObject* arguments) {
    const Session& session = session_in(arguments);
    std::array<std::int64_t, 2> found{};
    {
        const Locked lock;
        found = {session.in_progress.operators, session.engine.in_flight};
    }
    return tuple_of(found);
}

PyObject* has_lock(PyObject* /*arguments*/) {
    return PyBool_FromLong(the_mutex().mine() ? 1 : 0);
}

PyObject* disable_for_tests(PyObject* arguments) {
    PyObject* capsule = nullptr;
    const char* name = nullptr;
    parse(arguments, "Os", &capsule, &name);
    const std::string_view what = name;
    const Locked lock;
    Session& session = session_of(capsule);
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
    return nothing();
}

PyObject* in_place(PyObject* arguments) {
    const Session& session = session_in(arguments);
    Session::TakingOver count;
    {
        const Locked lock;
        count = session.taking_over;
    }
    const bool any = count.fewest != std::numeric_limits<std::int64_t>::max();
    const Object fewest(any ? PyLong_FromLongLong(count.fewest) : nothing());
    return Py_BuildValue("LO", static_cast<long long>(count.taken_over), fewest.get());
}

PyObject* bytes_asked_for(PyObject* arguments) {
    const char* said = nullptr;
    parse(arguments, "s", &said);
    return PyLong_FromLongLong(asked_for(std::string_view(said)));
}

PyObject* window(PyObject* arguments) {
    PyObject* list = nullptr;
    long long nbytes = 0;
    parse(arguments, "OL", &list, &nbytes);
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

PyObject* fitted(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long nbytes = 0;
    parse(arguments, "OL", &capsule, &nbytes);
    const Locked lock;
    Session& session = session_of(capsule);
    session.room.backoff.fitted(nbytes, session.engine.budget);
    return nothing();
}

PyObject* interrupt(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int replays = 0;
    int before = 0;
    parse(arguments, "Oip", &capsule, &replays, &before);
    const Locked lock;
    session_of(capsule).events.tests.interrupt_in = replays;
    session_of(capsule).events.tests.interrupt_before = before != 0;
    return nothing();
}

PyObject* refuse(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long operators = 0;
    parse(arguments, "OL", &capsule, &operators);
    const Locked lock;
    const std::int64_t left = std::exchange(session_of(capsule).events.tests.refuse_in, operators);
    return PyLong_FromLongLong(left);
}

PyObject* underestimated(PyObject* /*arguments*/) {
    const Locked lock;
    return PyLong_FromLongLong(TestHooks::underestimated);
}

PyObject* fix_costs(PyObject* arguments) {
    long long cost = 0;
    parse(arguments, "L", &cost);
    const Locked lock;
    fix_costs(cost);
    forget_workspaces();
    return nothing();
}

PyObject* set_clock_speed(PyObject* arguments) {
    double factor = 1.0;
    long long seed = -1;
    parse(arguments, "dL", &factor, &seed);
    set_clock_speed(factor, seed);
    return nothing();
}

PyObject* open_journal(PyObject* arguments) {
    PyObject* capsule = nullptr;
    Py_ssize_t entries = 0;
    parse(arguments, "On", &capsule, &entries);
    const Locked lock;
    session_of(capsule).engine.journal.open(static_cast<std::size_t>(entries));
    return nothing();
}

PyObject* journal(PyObject* arguments) {
    const Session& session = session_in(arguments);
    std::vector<Entry> entries;
    {
        const Locked lock;
        session.engine.journal.each([&](const Entry& entry) { entries.push_back(entry); });
    }
    Object list(PyList_New(0));
    for (const Entry& each : entries) {
        const auto kind = static_cast<std::int64_t>(each.kind);
        const Object made(tuple_of(
            std::array<std::int64_t, 6>{
                kind, each.id, each.number, each.flags, each.clock, each.memory
            }
        ));
        must(PyList_Append(list.get(), made.get()) == 0);
    }
    return list.give();
}

PyObject* remembered(PyObject* arguments) {
    const Session& session = session_in(arguments);
    const Locked lock;
    return PyLong_FromSize_t(learner_of(session)->remembered());
}

PyObject* remember_at_most(PyObject* arguments) {
    PyObject* capsule = nullptr;
    Py_ssize_t operators = 0;
    parse(arguments, "On", &capsule, &operators);
    const Locked lock;
    learner_of(session_of(capsule))->longest = static_cast<std::size_t>(operators);
    return nothing();
}

PyObject* places_in(PyObject* arguments) {
    PyObject* shape = nullptr;
    PyObject* step = nullptr;
    parse(arguments, "OO", &shape, &step);
    const auto found = places(numbers_in(shape), numbers_in(step));
    if (!found) {
        return nothing();
    }
    Object list(PyList_New(0));
    for (const std::int64_t place : *found) {
        const Object number(PyLong_FromLongLong(place));
        must(PyList_Append(list.get(), number.get()) == 0);
    }
    return list.give();
}

PyObject* unwritten_bytes(PyObject* arguments) {
    long long nbytes = 0;
    PyObject* list = nullptr;
    parse(arguments, "LO", &nbytes, &list);
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

PyObject* tally(PyObject* arguments) {
    int tallies = 0;
    parse(arguments, "p", &tallies);
    TORCH_CHECK(allocations_are_counted(), "write count_allocations() before tally(True)");
    tally_allocations(tallies != 0);
    return nothing();
}

PyObject* tallied(PyObject* /*arguments*/) {
    const GivenOutInside given = tallied_allocations();
    return Py_BuildValue(
        "LL", static_cast<long long>(given.now), static_cast<long long>(given.most)
    );
}

}  // namespace rekindle
