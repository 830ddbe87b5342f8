// What letting go of a storage would cost: its own cost, and that of its evicted neighborhood. Twin
// of rekindle.policies._neighborhood, where it is explained.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../base/types.h"
#include "chooser.h"
#include "graph.h"

namespace rekindle {

// Whose cost may have fallen, and how far at most.
struct Fallen final {
    Storage* storage;
    double fall;
};

// The cost in a score, and whose costs may have fallen since it was last asked.
class Neighborhood {
public:
    Neighborhood() = default;
    Neighborhood(const Neighborhood&) = delete;
    Neighborhood& operator=(const Neighborhood&) = delete;
    Neighborhood(Neighborhood&&) = delete;
    Neighborhood& operator=(Neighborhood&&) = delete;
    virtual ~Neighborhood() = default;

    virtual bool remembers() const { return false; }

    // The cost (ns) of letting go the resident `storage` now.
    virtual Nanoseconds cost(Storage& storage) = 0;

    // The time (ns) that it would take to have `storage` again, as far as is known.
    virtual Nanoseconds again(Storage& storage) { return storage.cost; }

    // A quick lower bound of `cost(storage)`.
    virtual Nanoseconds least(const Storage& storage) const { return storage.cost; }

    // Whose costs may have fallen since this was last asked: added to `found`.
    virtual void fallen(std::vector<Fallen>& /*found*/) {}

    // How many changes `fallen` has not told of yet; they keep storages alive.
    virtual std::size_t put_off() const { return 0; }

    virtual void expected(Storage& /*storage*/) {}

    virtual void evicted(Storage& /*storage*/) {}

    virtual void returned(Storage& /*storage*/) {}

    virtual void forgotten(Storage& /*storage*/) {}

    virtual void repriced(Storage& /*storage*/) {}

    virtual void disposed(Storage& /*storage*/) noexcept {}
};

// Every storage costs the same.
class Nothing final : public Neighborhood {
public:
    Nanoseconds cost(Storage& /*storage*/) override { return 1; }

    Nanoseconds least(const Storage& /*storage*/) const override { return 1; }
};

// The storage's own cost c0.
class Local final : public Neighborhood {
public:
    Nanoseconds cost(Storage& storage) override { return storage.cost; }
};

std::unique_ptr<Neighborhood> bind(Costs costs, Graph& graph);

}  // namespace rekindle
