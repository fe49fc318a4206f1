// The boundary to Python: device.py and group.py call what is defined here, as the module `_sim`.
#include "copies.h"
#include "group.h"
#include "host.h"
#include "memory.h"
#include "operators.h"
#include "random.h"
#include "recording.h"
#include "streams.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace {

py::tuple as_tuple(const sim::Mark &mark) { return py::make_tuple(mark.device, mark.stream, mark.index); }

py::dict as_dict(size_t id, const sim::Entry &entry) {
    constexpr std::array KINDS{"operation", "stream_wait", "host_wait", "host_work"};
    py::dict found;
    found["id"] = id;
    found["kind"] = KINDS[entry.kind];
    found["name"] = entry.label.name;
    found["thread"] = py::make_tuple(sim::thread_name(entry.thread), entry.thread_id);
    if (entry.kind == sim::Entry::OPERATION || entry.kind == sim::Entry::STREAM_WAIT)
        found["place"] = as_tuple(entry.place);
    if (entry.kind == sim::Entry::STREAM_WAIT || entry.kind == sim::Entry::HOST_WAIT)
        found["after"] = as_tuple(entry.after);
    if (entry.kind == sim::Entry::OPERATION || entry.kind == sim::Entry::HOST_WORK) {
        found["lane"] = entry.lane;
        found["bytes"] = entry.label.bytes;
        found["flops"] = entry.label.flops;
    }
    if (entry.kind == sim::Entry::OPERATION)
        found["ran_s"] = entry.ran_s;
    if (entry.kind == sim::Entry::HOST_WORK) {
        found["needs"] = entry.needs;
        found["blocks"] = entry.blocks;
    }
    return found;
}

py::list recording() {
    py::list found;
    for (const sim::Entry &entry : sim::recorded())
        found.append(as_dict(found.size(), entry));
    return found;
}

py::dict host_waits() {
    const auto counts = sim::num_host_waits();
    py::dict found;
    for (int thread = 0; thread < sim::NUM_THREADS; thread++)
        found[sim::thread_name(static_cast<sim::Thread>(thread))] = counts[thread];
    return found;
}

py::dict copy_counts() {
    const sim::CopyCounts counts = sim::copy_counts();
    py::dict found;
    found["to_device_bytes"] = counts.to_device_bytes;
    found["to_host_bytes"] = counts.to_host_bytes;
    found["between_devices_bytes"] = counts.between_devices_bytes;
    found["num_pageable"] = counts.num_pageable;
    return found;
}

} // namespace

PYBIND11_MODULE(_sim, m) {
    m.def("device_count", &sim::device_count);
    m.def("has_context", &sim::has_context);
    m.def("use_context", &sim::use_context);
    m.def("is_bad_fork", &sim::is_bad_fork);

    py::enum_<sim::Schedule>(m, "Schedule")
        .value("AT_ONCE", sim::Schedule::AT_ONCE)
        .value("LATE", sim::Schedule::LATE)
        .value("MAIN_FIRST", sim::Schedule::MAIN_FIRST)
        .value("SIDE_FIRST", sim::Schedule::SIDE_FIRST)
        .value("RANDOM", sim::Schedule::RANDOM)
        .value("THREADS", sim::Schedule::THREADS);
    m.def("set_schedule", &sim::set_schedule);
    m.def("set_pace", &sim::set_pace);
    m.def("schedule", &sim::schedule);
    m.def("run_device", &sim::run_device);
    m.def("num_pending", &sim::num_pending);
    m.def("host_waits", &host_waits);
    m.def("reset_host_waits", &sim::reset_host_waits);

    m.def("set_capacity", &sim::set_capacity);
    m.def("set_segments_like_cudas", &sim::set_segments_like_cudas);
    m.def("set_strict_frees", &sim::set_strict_frees);
    m.def("host_register", &sim::host_register);
    m.def("host_unregister", &sim::host_unregister);
    m.def("set_register_limit", &sim::set_register_limit);
    m.def("registered_bytes", &sim::registered_bytes);
    m.def("num_registered", &sim::num_registered);
    m.def("copy_counts", &copy_counts);
    m.def("reset_copy_counts", &sim::reset_copy_counts);

    m.def("default_generator", &sim::default_generator);
    m.def("undeferred", &sim::undeferred);
    m.def("reset_undeferred", &sim::reset_undeferred);

    py::class_<sim::Group, c10d::Backend, c10::intrusive_ptr<sim::Group>>(m, "Group")
        .def(py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>, int, int,
                      std::chrono::milliseconds>(),
             py::call_guard<py::gil_scoped_release>())
        .def("split", &sim::Group::split, py::call_guard<py::gil_scoped_release>())
        .def(
            "perform_nocolor_split", [](sim::Group &group, const at::Device &) { group.split(); },
            py::call_guard<py::gil_scoped_release>());

    m.def("record", &sim::record);
    m.def("is_recording", &sim::is_recording);
    m.def("recording", &recording);
    m.def("add_host_work", &sim::add_host_work);
}
