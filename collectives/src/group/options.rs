//! Defines the options of a group of ranks, and exchanges the addresses that open it.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Deadline, DynFabric, ErrorKind, Fabric, Rank};
use serde::{Deserialize, Serialize};

use crate::bootstrap::Bootstrap;
use crate::cost::Links;
use crate::error::Error;
use crate::group::agreement::{Offer, agree, blob};
use crate::group::driver::Membership;
use crate::group::engines::{OwnOffers, check_engine};
use crate::group::heap::Heap;
use crate::group::identity::Identity;
use crate::group::life::LifeCycle;
use crate::group::links;
use crate::group::network::{self, FabricReport};
use crate::group::runtime::Runtime;
use crate::group::segment::connects;
use crate::group::selection::Selection;
use crate::group::{Group, Setup};
use crate::plan::Tier;
use crate::topology::Topology;

const HOST: usize = 0;
const LOCAL_ADDRESS: usize = 1;
const NETWORK_ADDRESS: usize = 2;

/// Options for opening a group, such as its timeout and topology.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    label: Option<String>,
    timeout: Duration,
    start_timeout: Option<Duration>,
    topology: Option<Topology>,
    links: Vec<Links>,
    engine: Option<String>,
    strict: bool,
    beside_compute: bool,
    progress_thread: bool,
    heap_bytes: Option<u64>,
    device: Option<u32>,
    reasons: Vec<String>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(30);

        Self {
            label: None,
            timeout,
            start_timeout: None,
            topology: None,
            links: Vec::new(),
            engine: None,
            strict: false,
            beside_compute: false,
            progress_thread: false,
            heap_bytes: None,
            device: None,
            reasons: Vec::new(),
        }
    }
}

impl GroupOptions {
    /// Sets the name of the group in the errors of this rank, such as `group "tensor parallel"`.
    ///
    /// A label has at most 256 bytes. By default, a group that was split from another one has the
    /// name of that call, such as `split 2, color 0`, and the first group has none. The errors of a
    /// group that was split also name the ranks of the first group.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets the default timeout of all calls that wait for other ranks; initially 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the timeout for opening the group, in which all ranks must start; by default the
    /// [timeout](Self::timeout) of operations.
    #[must_use]
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = Some(timeout);
        self
    }

    /// Sets which rank belongs to which node. It must be equal on all ranks. By default, ranks
    /// whose bootstrap reports the same host share a node.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Sets the link rates from which the group chooses algorithms and chunk sizes.
    ///
    /// They can be the [links of a calibration](crate::cost::Calibration), and must be equal on all
    /// ranks. By default, links are estimated from their kinds. Call it once for each [kind of
    /// engines](Links::engine) that was measured.
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.links.retain(|known| known.engine != links.engine);
        self.links.push(links);
        self
    }

    /// Sets the kind of engines that operations use, such as `streams` or `sdma`. It must be equal
    /// on all ranks.
    ///
    /// By default, each operation uses the kind with the shortest predicted time among those that
    /// all ranks [offer](Group::engines). An operation can override it.
    #[must_use]
    pub fn engine(mut self, kind: impl Into<String>) -> Self {
        self.engine = Some(kind.into());
        self
    }

    /// Sets whether preparing an operation fails instead of using a slower
    /// [fallback](crate::group::Fallback); off by default.
    ///
    /// An operation can override it.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets whether operations run beside kernels of the caller, and so take few compute units; off
    /// by default.
    ///
    /// [`OperationBuilder::beside_compute`](crate::group::OperationBuilder::beside_compute)
    /// describes it, and overrides it for an operation.
    #[must_use]
    pub fn beside_compute(mut self, beside_compute: bool) -> Self {
        self.beside_compute = beside_compute;
        self
    }

    /// Sets whether a thread moves the transfers of this group, and of groups split from it,
    /// without calls; off by default.
    ///
    /// Engines of the host and of some NICs move bytes only while a thread polls them. By default
    /// that is the thread that waits or polls. With this, a thread of the group polls while
    /// something is open, which takes up to a processor, and sleeps otherwise. All groups that are
    /// split from this one share it.
    #[must_use]
    pub fn progress_thread(mut self, progress_thread: bool) -> Self {
        self.progress_thread = progress_thread;
        self
    }

    /// Sets the size in bytes of the first segment of the heap, from which operations take their
    /// inputs and outputs; by default 2 MiB.
    ///
    /// It must be equal on all ranks. The segment is allocated when the first operation is
    /// prepared. A larger one saves the exchanges in which the heap grows.
    #[must_use]
    pub fn heap_bytes(mut self, bytes: u64) -> Self {
        self.heap_bytes = Some(bytes);
        self
    }

    /// Sets the number of this rank's GPU and the reasons for the choice of the fabrics, which
    /// [`Group::selection`] returns.
    #[must_use]
    pub fn selected(mut self, device: Option<u32>, reasons: Vec<String>) -> Self {
        (self.device, self.reasons) = (device, reasons);
        self
    }

    /// Returns the timeout for opening the group. Without one, that is the timeout of operations,
    /// but not less than `least`.
    #[doc(hidden)]
    pub fn start_timeout_at_least(&self, least: Duration) -> Duration {
        self.start_timeout.unwrap_or_else(|| self.timeout.max(least))
    }

    #[doc(hidden)]
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Returns the topology if the caller has set one.
    #[doc(hidden)]
    pub fn given_topology(&self) -> Option<&Topology> {
        self.topology.as_ref()
    }

    /// Opens a group over one fabric that reaches every rank. Collective.
    ///
    /// The ranks exchange addresses and connect.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a zero timeout, or a topology of another
    /// number of ranks than the bootstrap's;
    /// [`Mismatch`](ErrorKind::Mismatch) if ranks differ in backend, version, timeout or topology;
    /// [`PeerLost`](ErrorKind::PeerLost) and [`Timeout`](ErrorKind::Timeout), naming the rank.
    pub fn open(
        self,
        bootstrap: impl Bootstrap + 'static,
        fabric: impl Fabric,
    ) -> Result<Group, Error> {
        self.open_with(Box::new(bootstrap), DynFabric::new(fabric), None)
    }

    /// Opens a group over two fabrics: `local` reaches the ranks of a node, `network` those of
    /// other nodes. Collective. The caller's memory is the local fabric's; the network registers it
    /// too. Where it cannot, as with memory of a device that the network does not reach, the bytes
    /// go through memory of the host, and the [report](crate::group::Report) says so.
    ///
    /// The local fabrics of different nodes may be of different backends.
    ///
    /// # Errors
    /// As [`open`](Self::open); ranks of one node must have one backend.
    pub fn open_tiers(
        self,
        bootstrap: impl Bootstrap + 'static,
        local: impl Fabric,
        network: impl Fabric,
    ) -> Result<Group, Error> {
        let network = DynFabric::new(network);
        self.open_with(Box::new(bootstrap), DynFabric::new(local), Some(network))
    }

    /// Sets the kind of engines of another group, or none.
    pub(super) fn inherited_engine(mut self, engine: Option<String>) -> Self {
        self.engine = engine;
        self
    }

    pub(super) fn measured_links(mut self, links: Vec<Links>) -> Self {
        self.links = links;
        self
    }

    pub(super) fn open_with(
        self,
        bootstrap: Box<dyn Bootstrap>,
        mut fabric: DynFabric,
        network: Option<DynFabric>,
    ) -> Result<Group, Error> {
        check_timeout(self.timeout)?;
        let start_timeout = self.start_timeout.unwrap_or(self.timeout);
        check_timeout(start_timeout)?;
        let ranks = Rank::all(bootstrap.ranks()).collect();
        let identity = Identity { label: self.label.clone(), first_ranks: ranks, is_first: true };
        let membership = Membership::of_group(&*bootstrap);
        let driver = membership.driver();
        let runtime = Runtime::new(bootstrap, self.timeout, identity, driver);
        let deadline = Deadline::after(start_timeout);
        // Before a fabric that stages its memory is put around the network.
        let network_backend = network.as_ref().map(Fabric::backend);
        let refusal = match &network {
            Some(network) => network::refusal(network, &fabric),
            None => Ok(None),
        };
        let offer = refusal
            .and_then(|refusal| self.offer(&runtime.life, &fabric, network.as_ref(), refusal));
        let offers = agree(&runtime, "open", offer, deadline)?;
        let topology = self.topology.map_or_else(|| of_hosts(&offers), Ok);
        let is_tiered = network.is_some();
        let reports = if is_tiered { FabricReport::all(&offers)? } else { Vec::new() };
        let staged = reports.iter().any(|report| report.refusal.is_some());
        let mut joined = topology.and_then(|topology| {
            if is_tiered {
                network::check_backends(&topology, &reports)?;
            }
            connect(
                &mut fabric,
                &topology,
                is_tiered,
                Tier::Local,
                (&offers, LOCAL_ADDRESS),
                deadline,
            )?;
            let (ranks, me) = (topology.ranks(), Fabric::rank(&fabric).index());
            let network = match network {
                Some(network) if staged => {
                    let refused = reports[me].refusal.is_some();
                    Some(network::staged(network, &fabric, ranks, refused, deadline)?)
                }
                network => network,
            };
            Ok((topology, network))
        });
        // Staging changes the addresses of the network fabrics.
        let staged_addresses = if staged {
            let address = |(_, network): &(_, Option<DynFabric>)| {
                let address = network.as_ref().map(|network| network.address());
                Offer::default().blob(address.unwrap_or_default())
            };
            let offer = joined.as_ref().map(address).map_err(Error::clone);
            Some(agree(&runtime, "stage", offer, deadline)?)
        } else {
            None
        };
        let addresses =
            staged_addresses.as_deref().map_or((&offers[..], NETWORK_ADDRESS), |it| (it, 0));
        let connected = match &mut joined {
            Ok((topology, Some(network))) => {
                connect(network, topology, true, Tier::Network, addresses, deadline)
            }
            Ok((_, None)) => Ok(()),
            Err(error) => Err(error.clone()),
        };
        let vote = connected.and_then(|()| {
            let (topology, network) = joined.as_ref().map_err(Error::clone)?;
            // Before the vote, so that all ranks learn if a rank has no thread left.
            driver.start_watchdog()?;
            if self.progress_thread {
                driver.start_progress()?;
                runtime.work.move_by_thread();
            }
            let known = links::of_fabrics(&fabric, network.as_ref(), topology);
            let own = OwnOffers::new(&fabric, network.as_ref())?;
            Ok((own, known))
        });
        let offer = |(own, known): &(OwnOffers, Links)| {
            Offer::default().blob(links::encode(known)).blob(own.encode())
        };
        let offers =
            agree(&runtime, "connect", vote.as_ref().map(offer).map_err(Error::clone), deadline)?;
        let links = links::of_all(&offers, 0)?;
        let engines = vote?.0.of_all(&offers, 1, &links, &self.links)?;
        if let Some(engine) = &self.engine {
            check_engine(engine, &engines)?;
        }

        let ((topology, network), strict) = (joined?, self.strict);
        let beside_compute = self.beside_compute;
        let selection = Selection {
            local: fabric.backend(),
            device: self.device,
            network: network_backend,
            reasons: self.reasons,
        };
        let me = runtime.life.bootstrap.rank().index();
        let refusal = reports.into_iter().nth(me).and_then(|report| report.refusal).map(Arc::from);
        let setup = Setup {
            fabric: Arc::new(fabric),
            network: network.map(Arc::new),
            topology,
            strict,
            beside_compute,
            refusal,
            engines: engines.into(),
            engine: self.engine,
            given_links: self.links,
            selection,
            is_split: false,
        };
        runtime.work.order.forget_thread();
        Ok(Group::new(membership, setup, runtime, Heap::new(self.heap_bytes)))
    }

    /// Returns the label, which is no value on which ranks agree.
    pub(super) fn own_label(&self) -> Option<String> {
        self.label.clone()
    }

    /// Returns the options that a group split from another one can have.
    pub(super) fn of_part(self) -> Result<PartOptions, Error> {
        let Self { label, timeout, topology, links, engine, .. } = self;
        label.as_deref().map_or(Ok(()), check_label)?;
        for (name, is_set) in [("topology", topology.is_some()), ("links", !links.is_empty())] {
            if is_set {
                let text = format!(
                    "{name} is set, expected none: a group that is split from another one uses that group's"
                );
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        }
        let (strict, beside_compute, heap_bytes) =
            (self.strict, self.beside_compute, self.heap_bytes);
        Ok(PartOptions { timeout, engine, strict, beside_compute, heap_bytes })
    }

    fn offer(
        &self,
        life: &LifeCycle,
        local: &DynFabric,
        network: Option<&DynFabric>,
        refusal: Option<String>,
    ) -> Result<Offer, Error> {
        let bootstrap = &life.bootstrap;
        self.label.as_deref().map_or(Ok(()), check_label)?;
        for fabric in [Some(local), network].into_iter().flatten() {
            if fabric.rank() != bootstrap.rank() {
                let text = format!(
                    "the fabric was opened as rank {}, but the bootstrap as rank {}; open both as \
                     the same rank",
                    fabric.rank(),
                    bootstrap.rank()
                );
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        }
        if let Some(topology) = &self.topology
            && topology.ranks() != bootstrap.ranks()
        {
            let text = format!(
                "topology is {topology}, expected {} ranks, the number of ranks of the bootstrap",
                bootstrap.ranks()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let name = |fabric: &DynFabric| fabric.backend().to_string();
        let nodes = self.topology.as_ref().map(Topology::notation);
        self.links.iter().try_for_each(Links::check)?;
        let mut links: Vec<_> =
            self.links.iter().map(|links| format!("{:016x}", links.fingerprint())).collect();
        links.sort_unstable();
        let links = (!links.is_empty()).then(|| links.join(" "));
        // With a network between them, nodes may differ.
        let backend = network.map_or_else(|| name(local), |_| "selected by each node".to_owned());
        let offer = Offer::default()
            .field("version", env!("CARGO_PKG_VERSION"))
            .field("network", network.map_or_else(|| "none".to_owned(), name))
            .field("backend", backend)
            .field("topology", nodes.as_deref().unwrap_or("derived from the hosts"))
            .field("links", links.as_deref().unwrap_or("reported by the fabrics"))
            .field("engine", engine_text(self.engine.as_deref()))
            .field("timeout", format_args!("{:?}", life.timeout))
            .field(
                "heap_bytes",
                self.heap_bytes.map_or("default".to_owned(), |bytes| bytes.to_string()),
            )
            .blob(bootstrap.host().as_bytes().to_vec())
            .blob(local.address());
        Ok(match network {
            Some(network) => {
                let reports = FabricReport { backend: name(local), refusal };
                offer.blob(network.address()).blob(reports.encode())
            }
            None => offer,
        })
    }
}

fn connect(
    fabric: &mut DynFabric,
    topology: &Topology,
    is_tiered: bool,
    tier: Tier,
    (offers, address): (&[Offer], usize),
    deadline: Deadline,
) -> Result<(), Error> {
    let me = fabric.rank();
    for (peer, offer) in Rank::all(offers.len()).zip(offers) {
        if connects(topology, is_tiered, tier, (me, peer)) {
            let connected = fabric.connect(peer, blob(offer, peer, address)?, deadline);
            connected.map_err(|error| {
                Error::of_fabric(format!("connect to rank {peer}"), error).with_other_side(peer)
            })?;
        }
    }
    Ok(())
}

fn of_hosts(offers: &[Offer]) -> Result<Topology, Error> {
    let hosts = Rank::all(offers.len()).zip(offers).map(|(rank, offer)| blob(offer, rank, HOST));
    Topology::by_key(hosts.collect::<Result<Vec<_>, _>>()?)
}

/// The most bytes of a label, which is a part of the labels of exchanges.
const LABEL_BYTES_MAX: usize = 256;

pub(super) fn check_label(label: &str) -> Result<(), Error> {
    if label.len() > LABEL_BYTES_MAX {
        let text =
            format!("label is {} bytes long, expected at most {LABEL_BYTES_MAX}", label.len());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

/// The options of a new group, which must be equal on all of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartOptions {
    pub(super) timeout: Duration,
    pub(super) engine: Option<String>,
    pub(super) strict: bool,
    pub(super) beside_compute: bool,
    pub(super) heap_bytes: Option<u64>,
}

impl PartOptions {
    /// Returns the name and the values of the first option that differs.
    pub(super) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let fields = |options: &Self| {
            let heap_bytes = options.heap_bytes;
            [
                ("timeout", format!("{:?}", options.timeout)),
                ("engine", engine_text(options.engine.as_deref()).to_owned()),
                ("strict", options.strict.to_string()),
                ("beside_compute", options.beside_compute.to_string()),
                ("heap_bytes", heap_bytes.map_or("default".to_owned(), |it| it.to_string())),
            ]
        };

        let mut pairs = fields(self).into_iter().zip(fields(other));
        let ((name, own), (_, other)) = pairs.find(|(own, other)| own != other)?;

        Some((name, own, other))
    }
}

/// Returns the kind of engines that options name, as a value to compare between ranks.
fn engine_text(engine: Option<&str>) -> &str {
    engine.unwrap_or("by predicted times")
}

pub(super) fn check_timeout(timeout: Duration) -> Result<(), Error> {
    if timeout.is_zero() {
        let text = "timeout is 0 s, expected more than 0 s";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
