// A process group of device tensors: collectives that run when their stream gets there, by a gloo group over the bytes.
//
//   all_reduce ──> wait for the current stream ──> operation of the group's stream ──> gloo, on all ranks
//   work.wait() ──> the current stream waits; the host does not, as with NCCL
//
// A collective blocks until every rank runs its part. A GPU would, without its host; here some thread must. So a rank
// that starts tells its peers (a datagram), and each has a thread that runs its own stream up to the same collective as
// soon as it is issued. That keeps "late" as late as any rank waits.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace sim {

class Group final : public c10d::Backend {
  public:
    using Tensors = std::vector<at::Tensor>;
    using WorkPtr = c10::intrusive_ptr<c10d::Work>;
    using Start = std::function<WorkPtr()>;

    /// `gloo` has the same ranks. `store` is where ranks find the addresses of one another.
    Group(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size);
    ~Group() override;

    const std::string getBackendName() const override { return "simccl"; }
    bool supportsCoalescing() const override { return true; }
    void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override;
    /// Runs what was issued, so that no peer waits for this rank, and ends the threads. Blocks.
    /// destroy_process_group calls it; a group that is destroyed without it leaves its threads, and hangs nobody.
    void shutdown() override;

    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override;
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override;
    WorkPtr allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &options) override;
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override;
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &options) override;
    WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input, const c10d::AllgatherOptions &options) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override;
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &options) override;
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &options) override;
    WorkPtr reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                           const c10d::ReduceScatterOptions &options) override;
    WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                 const c10d::ReduceScatterOptions &options) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &options) override;
    WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &output_sizes,
                          std::vector<int64_t> &input_sizes, const c10d::AllToAllOptions &options) override;
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &options) override;
    WorkPtr send(Tensors &tensors, int rank, int tag) override;
    WorkPtr recv(Tensors &tensors, int rank, int tag) override;
    WorkPtr barrier(const c10d::BarrierOptions &options) override;

    /// What is called until endCoalescing is one operation of the stream, whose parts start together. Calls may nest.
    void startCoalescing() override;
    WorkPtr endCoalescing() override;

  private:
    static constexpr int ALL_RANKS = -1;

    /// One operation of the stream, in parts that start together.
    struct Parts {
        std::string name;
        std::vector<Start> starts;
        Tensors tensors; // on the device, which the parts use
        c10d::OpType type = c10d::OpType::COALESCED;
        std::set<int> peers;     // the other ranks that take part
        int channel = ALL_RANKS; // or the peer of a send or recv
    };

    WorkPtr add(const std::string &name, c10d::OpType type, const Tensors &tensors, Start start, int peer = ALL_RANKS);
    WorkPtr issue_parts(Parts parts, bool blocks_host);
    std::set<int> all_peers() const;

    const c10::intrusive_ptr<c10d::Backend> gloo;
    std::mutex lock; // guards the next two
    int coalescing_depth = 0;
    std::optional<Parts> coalesced; // between startCoalescing and endCoalescing

    class Post; // the datagrams
    struct Inner;
    Inner *const inner;
};

} // namespace sim
