// Who has memory, for the report and for errors.
#include "driver.h"
#include "python.h"
#include "signature.h"

namespace rekindle {

namespace {

int flags_of(const Record& record) {
    int flags = record.replayable ? Holder::REPLAYABLE : 0;
    flags |= record.pinned ? Holder::PINNED : 0;
    flags |= record.is_held() ? Holder::HELD : 0;
    flags |= record.references != 0 ? Holder::REFERENCED : 0;
    flags |= record.consumed() ? Holder::CONSUMED : 0;
    return flags;
}

// Where the gradient of a parameter is; null: it has none, or that was let go.
const void* gradient_of(const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& leaf) {
    const at::Tensor gradient = at::Tensor(leaf).grad();
    const bool has = gradient.defined() && has_memory(*gradient.unsafeGetTensorImpl()) &&
                     !is_husk(*gradient.storage().unsafeGetStorageImpl());
    return has ? gradient.const_data_ptr() : nullptr;
}

}  // namespace

Bytes Driver::evicted_bytes() const {
    Bytes total = 0;
    for (const Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const bool wanted = !each->dead() || static_cast<const Record*>(each)->husk;
        total += !each->resident && wanted ? each->nbytes : 0;
    }
    return total;
}

std::vector<Holder> Driver::holders() {
    std::vector<Holder> found;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        Record& record = record_of(*each);
        if (!record.resident || record.nbytes == 0) {
            continue;
        }
        int flags = flags_of(record);
        const void* gradient = nullptr;
        const void* parameter = nullptr;
        if (record.parameter) {
            if (const auto origin = record.origin.lock()) {
                flags |= Holder::PARAMETER;
                parameter = object_of(*origin);
                gradient = gradient_of(origin);
            }
        }
        const Home home = record.at();
        const void* memory = home ? home->data_ptr().get() : nullptr;
        OpId maker = -1;
        each_maker(record, [&](Call& call) { maker = maker < 0 ? call.id : maker; });
        found.push_back({
            record.nbytes,
            memory,
            flags,
            record.site(),
            gradient,
            parameter,
            record.id,
            maker,
        });
    }
    table_.each([&](const void* address, const Resident& resident) {
        if (resident.record == nullptr) {
            const bool heard = resident.home == nullptr;
            const void* memory = heard ? address : resident.home->data_ptr().get();
            const int flags = Holder::COUNTED;
            found.push_back({resident.nbytes, memory, flags, "", nullptr, nullptr, -1, -1});
        }
    });
    return found;
}

}  // namespace rekindle
