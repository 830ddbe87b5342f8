// The torch side of an engine's storage: where its value lives, and what tells of writes to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "../base/types.h"
#include "../engine/graph.h"
#include "../ops/facts.h"
#include "../torch/homes.h"
#include "../torch/streams.h"

namespace rekindle {

// Memory that others than PyTorch may write without a word: NumPy, another process, who fills a
// buffer (R4).
struct Foreign final {
    Ref<Storage> copy;                      // what recipes read in its place, as it was last
    std::optional<std::uint64_t> checksum;  // of a weight, when recipes began to read it
};

struct Record final : Storage {
    Record(Graph& graph, StorageId number, Bytes counted) : Storage(graph, number, counted) {}

    Bytes size = 0;  // of its memory, wherever that is: on another device it does not count
    const void* address = nullptr;    // by which it is found; null without memory
    Home owned;                       // null: the program alone keeps it, or it is evicted
    WeakHome home = no_home();        // where it lives, whoever keeps it
    WeakTensor origin = no_tensor();  // a tensor of the program that has that version counter
    Version version;
    Order order;                    // among the streams of a device
    const Facts* maker = nullptr;   // null: seen first as an argument
    Ref<Storage> successor;         // whose value now lives where this one did
    Record* held_before = nullptr;  // among what the program may hold
    Record* held_after = nullptr;
    std::int32_t depth = 0;            // how many calls hang on each other, where somebody counts
    std::uint16_t chain = 0;           // likewise, with grad mode off
    std::uint8_t flags = 0;            // of its content
    bool maybe_held : 1 = false;       // among what the program may hold
    bool parameter : 1 = false;        // a leaf that requires a gradient
    bool unheard : 1 = false;          // not the allocator's: nobody tells when its memory goes
    bool returnable : 1 = false;       // numbers that nothing reads but operators
    bool leaving : 1 = false;          // on its way to the host
    bool husk : 1 = false;             // evicted while the program holds it: `home` is empty
    bool strays : 1 = false;           // its version counter tells of other memory as well
    bool unwatched : 1 = false;        // it has a version counter, which nobody asked for yet
    std::unique_ptr<Foreign> foreign;  // null: nobody but PyTorch writes there

    const char* site() const noexcept { return maker == nullptr ? "source" : maker->name.c_str(); }

    // The memory of a value that is there.
    Home at() const { return owned ? owned : home.lock(); }

    // Whether the program keeps the memory beside the runtime.
    bool is_held() const noexcept;
    // A recipe, or autograd, is to read `reader`, which has this value: its version matters now.
    void find_version_counter(const c10::TensorImpl& reader);
    // `reader` tells of its version from now on.
    void follow(const c10::TensorImpl& reader);
    // Whether the version counter tells of `there`: not after `x.data = y`.
    bool origin_is_at(const Home& there) const;
};

inline Record& record_of(Storage& storage) noexcept {
    return static_cast<Record&>(storage);
}

// Where the value of `record`, or what took its place unnoticed, lives now.
inline Record& current(Record& record) noexcept {
    Record* found = &record;
    while (found->successor) {
        found = static_cast<Record*>(found->successor.get());
    }
    return *found;
}

}  // namespace rekindle
