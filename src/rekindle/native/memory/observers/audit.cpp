#include "audit.h"

#include "../../torch/placeholder.h"
#include "../../torch/replay_dispatch_guard.h"
#include "../../torch/storage_ptr.h"
#include "../records/storage_record.h"

namespace rekindle {

namespace {

// Call `visit(record, checksum)` for each output of the operator call `call` that has memory, as a
// value without room has none. Skip outputs of operators such as `empty`: their contents
// are undefined, so their checksums would differ in each run.
template <class F>
void each_checksum(const Recipe& call, Device& device, F&& visit) {
    for (const Value* value : call.outputs()) {
        StorageRecord& record = record_of(*value->storage);
        if ((record.flags & UNWRITTEN) != 0) {
            continue;
        }
        if (const StoragePtr storage_impl = record.at();
            storage_impl && !is_placeholder(*storage_impl)) {
            visit(record, checksum_of(storage_impl, device));
        }
    }
}

}  // namespace

std::uint64_t checksum_of(const StoragePtr& storage_impl, Device& device) {
    if (storage_impl->device_type() == c10::DeviceType::CPU) {
        return checksum_of(*storage_impl);
    }
    std::uint64_t checksum = 0;
    device.in_order([&] {
        const ReplayDispatchGuard guard(false);
        const at::Tensor copied = whole_of(storage_impl).to(c10::kCPU);
        checksum = checksum_of(*copied.storage().unsafeGetStorageImpl());
    });
    return checksum;
}

void Audit::made(const Recipe& call, Device& device) {
    if (call.replayable) {
        each_checksum(call, device, [&](StorageRecord& record, std::uint64_t checksum) {
            first_.insert_or_assign(&record, checksum);
        });
    }
}

void Audit::made_again(const Recipe& call, Device& device) {
    bool same = true;
    each_checksum(call, device, [&](StorageRecord& record, std::uint64_t checksum) {
        const auto found = first_.find(&record);
        same = same && (found == first_.end() || found->second == checksum);
    });
    if (!same) {
        different_.push_back({call.facts, call.id});
    }
}

}  // namespace rekindle
