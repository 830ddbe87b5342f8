#include "forks.h"

#include <vector>

#include "../base/mutex.h"
#include "../torch/placeholder.h"
#include "../torch/raised.h"
#include "records/storage_record.h"

namespace rekindle {

namespace {

// Return the sources on the host that are no weights, gradients or optimizer state, up to `most`
// bytes in sum.
std::vector<Ref<Storage>> data_on_host(const Session& session, Bytes most) {
    std::vector<Ref<Storage>> found;
    Bytes total = 0;
    for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        const StorageRecord& record = record_of(*each);
        const bool is_data = record.role == Role::unknown && !record.parameter;
        if (is_data && !record.resident && record.on_host && !record.replayable && record.held &&
            record.nbytes <= most - total) {
            total += record.nbytes;
            found.emplace_back(each);
        }
    }
    return found;
}

}  // namespace

void bring_for_child(Session& session) noexcept {
    // If a read fails, or the data do not fit, the child gets the error.
    without_throwing([&] {
        const auto lock = locked_if_not_mine();
        if (!session.held.eviction || !session.held.eviction->open ||
            !session.held.eviction->moves()) {
            return;
        }
        session.frees.process_pending();
        Bytes total = 0;
        const auto data = data_on_host(session, session.engine.budget / 2);
        for (const Ref<Storage>& each : data) {
            total += each->nbytes;
        }
        // Make room for all at once: otherwise one might be evicted for the next.
        session.room.clear(total);
        for (const Ref<Storage>& each : data) {
            if (each->listed && !each->resident) {
                session.room.use(record_of(*each));
            }
        }
        session.frees.process_pending();
    });
}

void leave_in_child(Session& session) noexcept {
    without_throwing([&] {
        const auto lock = locked_if_not_mine();
        session.engine.budget = UNLIMITED;
        name_fork_in_errors();
        for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
            if (const StoragePtr storage_impl = record_of(*each).at()) {
                refuse_reading(*storage_impl);
            }
        }
    });
}

}  // namespace rekindle
