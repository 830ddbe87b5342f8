#include "neighborhood.h"

#include "exact.h"

namespace rekindle {

std::unique_ptr<Neighborhood> bind(Costs costs, Graph& graph) {
    switch (costs) {
        case Costs::nothing:
            return std::make_unique<Nothing>();
        case Costs::local:
            return std::make_unique<Local>();
        case Costs::classes:
        case Costs::exact:
        case Costs::ancestors:
        case Costs::capped:
            break;
    }
    return std::make_unique<Exact>(costs, graph);
}

}  // namespace rekindle
