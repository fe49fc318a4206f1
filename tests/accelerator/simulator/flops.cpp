#include "flops.h"

#include <algorithm>

namespace sim {

double flops_of(const std::string &name, const Values &arguments, const Values &results) {
    const auto numel = [](const c10::IValue &value) {
        return value.isTensor() ? static_cast<double>(value.toTensor().numel()) : 0.0;
    };
    const auto sizes = [&](size_t at) { return arguments.at(at).toTensor().sizes(); };
    if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::dot")
        return 2 * numel(arguments[0]) * (sizes(1).size() > 1 ? static_cast<double>(sizes(1).back()) : 1);
    if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv")
        return 2 * numel(arguments[1]) * (sizes(2).size() > 1 ? static_cast<double>(sizes(2).back()) : 1);
    if (name == "aten::convolution" || name == "aten::convolution_backward") {
        const bool is_backward = name == "aten::convolution_backward";
        const double outputs = numel(is_backward ? arguments[0] : results.at(0));
        const size_t weight = is_backward ? 2 : 1;
        const double once =
            2 * outputs * numel(arguments[weight]) / static_cast<double>(std::max<int64_t>(sizes(weight)[0], 1));
        return is_backward ? 2 * once : once;
    }
    if (name.find("aten::_scaled_dot_product_flash_attention_for_cpu") == 0) {
        const bool is_backward = name.find("_backward") != std::string::npos;
        const size_t query = is_backward ? 1 : 0;
        const double once = 4 * numel(arguments[query]) * static_cast<double>(sizes(query + 1)[2]);
        return is_backward ? 2.5 * once : once;
    }
    return 0;
}

} // namespace sim
