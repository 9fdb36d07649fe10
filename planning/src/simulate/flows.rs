//! Models simulated transfers in progress, and the links, NICs and memory that they share.
//!
//! A flow is a transfer in progress. It gets an equal share of every resource that it uses, and
//! moves at the smallest of these shares. If another resource limits a flow, the rest of its share
//! is not given to the others. So rates are at most those of max–min fairness, and times are
//! overestimated if anything. They are the same if all flows of a resource are limited alike, as in
//! symmetric plans. In return, a flow that begins or ends changes only the rates of its neighbours,
//! and not of their neighbours.
//!
//! Rates are `f64`. Only sums, products, quotients and roundings are used, which IEEE 754 defines
//! to the bit.

use peerlane_hal::Rank;

use super::event_queue::EventQueue;
use crate::cost::{Link, Links};
use crate::plan::Tier;
use crate::topology::Topology;

/// The largest number of shared resources that one transfer uses.
///
/// They are three of the lane and the ranks, two NICs, and three of the processors of a node.
const DEMANDS_MAX: usize = 8;

/// Identifies a shared resource that a transfer uses, such as a NIC, with its total rate in bytes
/// per picosecond.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    pub(super) resource: u32,
    pub(super) rate: f64,
}

/// Lists all shared resources that one simulated transfer uses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demands {
    demands: [Demand; DEMANDS_MAX],
    count: u8,
}

/// Tracks a simulated transfer in progress.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    demands: Demands,
    /// The largest rate of the transfer, whatever its resources allow.
    rate_max: f64,
    /// The number of bytes that had not been moved at the time `since`.
    remaining: f64,
    /// The current rate in bytes per picosecond.
    rate: f64,
    since: u64,
    /// The number of the update that last computed the rate.
    last_update: u64,
}

/// Tracks the simulated transfers that use one shared resource.
#[derive(Clone, Debug, Default)]
struct Resource {
    flows: Vec<u32>,
    /// The largest number of transfers that have used the resource at the same time.
    flows_max: u32,
    /// Whether the resource is in the list [`Flows::changed`].
    changed: bool,
}

/// Tracks all simulated transfers in progress, and computes their rates from the resources that
/// they share.
#[derive(Debug)]
pub(super) struct Flows {
    flows: Vec<Flow>,
    resources: Vec<Resource>,
    /// The resources that have gained or lost a transfer since the last update.
    changed: Vec<u32>,
    /// The number of times that rates have been updated.
    updates: u64,
}

impl Demands {
    /// Adds a resource that the transfer uses, with the total rate of the resource.
    ///
    /// There are at most [`DEMANDS_MAX`] resources.
    pub(super) fn push(&mut self, resource: u32, bytes_per_second: f64) {
        self.demands[usize::from(self.count)] =
            Demand { resource, rate: per_picosecond(bytes_per_second) };
        self.count += 1;
    }

    fn all(&self) -> &[Demand] {
        &self.demands[..usize::from(self.count)]
    }
}

impl Flows {
    pub(super) fn new(flows: usize, resources: usize) -> Self {
        Self {
            flows: vec![Flow::default(); flows],
            resources: vec![Resource::default(); resources],
            changed: Vec::new(),
            updates: 0,
        }
    }

    /// Adds transfer `number`, which begins at the time `now`.
    ///
    /// The next [`update_rates`](Self::update_rates) computes its rate and its end.
    pub(super) fn begin(
        &mut self,
        number: u32,
        now: u64,
        bytes: u64,
        bytes_per_second: f64,
        demands: Demands,
    ) {
        self.flows[number as usize] = Flow {
            demands,
            rate_max: per_picosecond(bytes_per_second),
            remaining: bytes as f64,
            rate: 0.0,
            since: now,
            last_update: 0,
        };

        for &Demand { resource, .. } in demands.all() {
            self.resources[resource as usize].flows.push(number);
            self.mark_changed(resource);
        }
    }

    /// Removes transfer `number` from the resources that it uses, so that other transfers can use
    /// them.
    pub(super) fn end(&mut self, number: u32) {
        let demands = self.flows[number as usize].demands;
        for &Demand { resource, .. } in demands.all() {
            let flows = &mut self.resources[resource as usize].flows;
            let index = flows.iter().position(|&flow| flow == number).expect("the flow is there");
            flows.swap_remove(index);
            self.mark_changed(resource);
        }
    }

    /// Recomputes transfer rates after all events at `now`, and reschedules the ends of transfers
    /// whose rates have changed.
    ///
    /// `event` maps the number of a flow to that of its event.
    pub(super) fn update_rates(
        &mut self,
        now: u64,
        queue: &mut EventQueue,
        event: impl Fn(u32) -> u32,
    ) {
        // By this number `update_flow` recognises the transfers that it has updated already.
        self.updates += 1;

        while let Some(resource) = self.changed.pop() {
            let Resource { flows, flows_max, changed } = &mut self.resources[resource as usize];
            *changed = false;
            *flows_max = (*flows_max).max(flows.len() as u32);

            // The list is borrowed anew for each flow, because `update_flow` borrows all resources.
            for index in 0..flows.len() {
                let number = self.resources[resource as usize].flows[index];
                if let Some(end) = self.update_flow(number, now) {
                    queue.schedule(event(number), end);
                }
            }
        }
    }

    /// Recomputes the rate of a transfer, and returns its new end time, or `None` if its end has
    /// not changed.
    fn update_flow(&mut self, number: u32, now: u64) -> Option<u64> {
        let flow = &mut self.flows[number as usize];
        // A transfer can use several resources that have changed. One computation takes all of them
        // into account.
        if flow.last_update == self.updates {
            return None;
        }
        flow.last_update = self.updates;

        // Each resource is shared in equal parts, even if a flow cannot use all of its part.
        let share = |&Demand { resource, rate }: &Demand| {
            rate / self.resources[resource as usize].flows.len() as f64
        };
        let rate = flow.demands.all().iter().map(share).fold(flow.rate_max, f64::min);

        // The rate of a new transfer is 0, so its end is always computed.
        if rate == flow.rate {
            return None;
        }

        let moved = flow.rate * (now - flow.since) as f64;
        flow.remaining = (flow.remaining - moved).max(0.0);
        flow.rate = rate;
        flow.since = now;

        // A cast from a float to an integer saturates.
        Some(now.saturating_add((flow.remaining / rate).ceil() as u64))
    }

    /// Adds a resource to the list of changed resources, unless the list already contains it.
    fn mark_changed(&mut self, resource: u32) {
        let changed = &mut self.resources[resource as usize].changed;
        if !std::mem::replace(changed, true) {
            self.changed.push(resource);
        }
    }

    /// Returns the largest number of transfers that have used `resource` at the same time.
    pub(super) fn flows_max(&self, resource: u32) -> u32 {
        self.resources[resource as usize].flows_max
    }
}

fn per_picosecond(bytes_per_second: f64) -> f64 {
    bytes_per_second / 1e12
}

/// Classifies the link that a copy uses, as within a rank, within a node or between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkClass {
    /// The link inside a rank, for copies from a rank to itself.
    Own,
    /// The links between the ranks of a node, which belong to [`Tier::Local`].
    Local,
    /// The links between nodes, which belong to [`Tier::Network`].
    Network,
}

impl LinkClass {
    /// All kinds of links, from within a rank to between nodes.
    pub const ALL: [Self; 3] = [Self::Own, Self::Local, Self::Network];

    /// Returns the kind of link that a copy over `tier` uses, or [`Own`](Self::Own) if `to_self` is
    /// true.
    pub const fn from_tier(tier: Tier, to_self: bool) -> Self {
        match tier {
            _ if to_self => Self::Own,
            Tier::Local => Self::Local,
            Tier::Network => Self::Network,
        }
    }

    /// Returns the name of this kind of link, as tables show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Local => Tier::Local.name(),
            Self::Network => Tier::Network.name(),
        }
    }

    /// Returns the latencies and bandwidths in `links` that apply to this kind of link.
    pub fn link(self, links: &Links) -> &Link {
        match self {
            Self::Own => &links.own,
            Self::Local => &links.local,
            Self::Network => &links.network,
        }
    }
}

/// Assigns an index to each simulated resource that copies share, such as a NIC, and finds the
/// resources of a copy.
///
/// The indices are in this order: engines by lane, the links into and out of each rank by class,
/// threads by rank, NICs by direction, and processors and memory by node.
#[derive(Debug)]
pub(super) struct Resources<'a> {
    links: &'a Links,
    topology: &'a Topology,
    /// The number of lanes of all ranks together.
    lanes: u32,
    /// The index of the first NIC of each node among all NICs, followed by the total number of
    /// NICs.
    first_nic: Vec<u32>,
    /// The index of each rank among the ranks of its node.
    local_index: Vec<u32>,
}

/// Describes the lane, the ranks and the link of a copy, which determine the resources that it
/// uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyPath {
    pub(super) lane: u32,
    /// The rank that executes the copy.
    pub(super) by: Rank,
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) class: LinkClass,
    /// The rate of the copy when it has all resources for itself.
    pub(super) bytes_per_second: f64,
}

impl<'a> Resources<'a> {
    pub(super) fn new(links: &'a Links, topology: &'a Topology, lanes: u32) -> Self {
        let mut first_nic = vec![0];
        let mut local_index = vec![0; topology.ranks()];

        for node in 0..topology.nodes() as u32 {
            let members = topology.members(node);
            // Each rank uses one NIC, so a node uses at most as many as it has ranks.
            let ranks = members.len() as u32;
            let nics = links.node.nics.map_or(ranks, |nics| nics.min(ranks));
            first_nic.push(first_nic[node as usize] + nics);

            for (index, member) in (0..).zip(members) {
                local_index[member.index()] = index;
            }
        }

        Self { links, topology, lanes, first_nic, local_index }
    }

    /// Returns how many simulated resources all lanes, ranks and nodes have together.
    pub(super) fn count(&self) -> usize {
        // The memory of the nodes has the last numbers.
        (self.memory(self.topology.nodes() as u32)) as usize
    }

    /// Returns the shared resources that `copy` uses, with their total rates.
    pub(super) fn demands(&self, copy: CopyPath) -> Demands {
        let CopyPath { lane, by, from, to, class, bytes_per_second } = copy;
        let link = class.link(self.links);
        let node = &self.links.node;

        let mut demands = Demands::default();
        demands.push(lane, link.engine_bytes_per_second);
        demands.push(self.rank_ingress(to, class), link.receive_bytes_per_second);
        demands.push(self.rank_egress(from, class), link.send_bytes_per_second);

        if class == LinkClass::Network {
            let rate = node.nic_bytes_per_second.unwrap_or(f64::INFINITY);
            demands.push(self.nic_egress(from), rate);
            demands.push(self.nic_ingress(to), rate);
        }

        if link.by_processor {
            // The rank that executes the copy moves the bytes, whoever owns them.
            demands.push(self.thread(by), bytes_per_second);

            let node_index = self.topology.node(by);
            // Each processor is as fast as the thread that it executes.
            if let Some(processors) = node.processors {
                demands.push(self.processors(node_index), f64::from(processors) * bytes_per_second);
            }
            if let Some(rate) = node.copy_bytes_per_second {
                demands.push(self.memory(node_index), rate);
            }
        }

        demands
    }

    /// Returns the index of the simulated resource that stands for the link of class `class` into
    /// `rank`.
    ///
    /// Each class has a link of its own.
    pub(super) fn rank_ingress(&self, rank: Rank, class: LinkClass) -> u32 {
        self.lanes + rank.0 * 3 + class as u32
    }

    /// Returns the index of the simulated resource that stands for the link of class `class` out of
    /// `rank`.
    fn rank_egress(&self, rank: Rank, class: LinkClass) -> u32 {
        self.rank_ingress(rank, class) + self.ranks() * 3
    }

    /// Returns the index of the simulated resource that stands for the NIC through which bytes
    /// reach `rank`.
    pub(super) fn nic_ingress(&self, rank: Rank) -> u32 {
        let node = self.topology.node(rank) as usize;
        let (first, end) = (self.first_nic[node], self.first_nic[node + 1]);
        // The ranks of a node take its NICs by turns.
        let nic = first + self.local_index[rank.index()] % (end - first);

        self.thread(Rank(self.ranks())) + nic
    }

    /// Returns the index of the simulated resource that stands for the NIC through which bytes
    /// leave `rank`.
    fn nic_egress(&self, rank: Rank) -> u32 {
        self.nic_ingress(rank) + self.nics()
    }

    /// Returns the index of the simulated resource that stands for the thread that makes the copies
    /// of `rank`.
    fn thread(&self, rank: Rank) -> u32 {
        self.rank_egress(Rank(self.ranks()), LinkClass::Own) + rank.0
    }

    /// Returns the index of the simulated resource that stands for all processors of `node`
    /// together.
    fn processors(&self, node: u32) -> u32 {
        self.thread(Rank(self.ranks())) + self.nics() * 2 + node
    }

    /// Returns the index of the simulated resource that stands for the memory bandwidth of `node`.
    fn memory(&self, node: u32) -> u32 {
        self.processors(node) + self.topology.nodes() as u32
    }

    fn nics(&self) -> u32 {
        self.first_nic[self.topology.nodes()]
    }

    fn ranks(&self) -> u32 {
        self.topology.ranks() as u32
    }
}
