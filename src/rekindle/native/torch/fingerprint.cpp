#include "fingerprint.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cstddef>

#include "replay_dispatch_guard.h"

namespace rekindle {

Fingerprint fingerprint_of(const StoragePtr& storage_impl) {
    if (storage_impl->device_type() == c10::DeviceType::CPU) {
        return {checksum_of(*storage_impl), {}};
    }
    constexpr std::int64_t columns = 512;
    const ReplayDispatchGuard guard(false);
    const at::Tensor bytes = whole_of(storage_impl);
    const std::int64_t rows = bytes.numel() / (columns * std::int64_t{sizeof(std::int64_t)});
    const std::int64_t in_rows = rows * columns * std::int64_t{sizeof(std::int64_t)};
    const at::Tensor table = bytes.narrow(0, 0, in_rows).view(at::kLong).view({rows, columns});
    const at::Tensor rest = bytes.narrow(0, in_rows, bytes.numel() - in_rows);
    return {0, {at::sum(table, 0), at::sum(table, 1), at::clone(rest)}};
}

bool is_same(const Fingerprint& one, const Fingerprint& other) {
    const ReplayDispatchGuard guard(false);
    return one.checksum == other.checksum &&
           std::ranges::equal(
               one.on_device, other.on_device, [](const at::Tensor& a, const at::Tensor& b) {
                   return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
               }
           );
}

}  // namespace rekindle
