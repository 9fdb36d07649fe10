//! Opens a group of ranks on the best fabrics of the machine.
//!
//! [`from_env`] is enough for most programs. [`OpenOptions`] names a backend, a device or a timeout
//! instead. [`Group::selection`] says what was chosen and why. A [`Survey`] shows what the machine has
//! without opening anything.

use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::topology::Topology;
use peerlane_hal::wire::{Reader, Truncated, Writer};
use peerlane_hal::{Deadline, ErrorKind, Rank};

use crate::{Error, Group, GroupOptions};

mod fabrics;
mod survey;

pub use fabrics::{FabricOptions, Fabrics};
pub use survey::{Backend, Device, Survey};

/// The timeout for opening a group and for its operations, unless the caller sets one.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Opens the group of the launcher (torchrun, mpirun or srun) on the best fabrics of the machines. Collective.
///
/// Without a launcher, the group has one rank. [`OpenOptions`] describes the choice, and [`Group::selection`] returns it.
///
/// ```no_run
/// let mut group = peerlane::from_env()?;
/// println!("{}", group.selection());
/// let mut gather = group.all_gather::<f32>(1024).prepare()?;
/// gather.run()?;
/// drop(gather);
/// group.close()?;
/// # Ok::<(), peerlane::Error>(())
/// ```
///
/// # Errors
/// As [`OpenOptions::from_env`].
pub fn from_env() -> Result<Group, Error> {
    OpenOptions::default().from_env()
}

/// The backends and the GPU of one rank.
#[derive(Debug)]
struct Choice {
    local: Backend,
    device: Option<u32>,
    network: Option<Backend>,
    /// The reasons for an automatic choice; empty if the caller chose.
    reasons: Vec<String>,
}

/// Options for opening a group, such as its backend and timeout.
///
/// By default, the ranks of a machine use its GPUs if each rank can have one of its own, and host memory otherwise. Ranks on
/// several machines use RDMA between them. All ranks of a machine choose alike, because they exchange what they have found.
///
/// ```
/// use peerlane::open::{Backend, OpenOptions};
///
/// # #[cfg(feature = "host")] {
/// // Without a launcher, this is a group of one rank.
/// let group = OpenOptions::default().backend(Backend::Host).from_env()?;
/// println!("{}", group.selection());
/// group.close()?;
/// # }
/// # Ok::<(), peerlane::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    backend: Option<Backend>,
    device: Option<u32>,
    network: Option<Backend>,
    topology: Option<Topology>,
    timeout: Option<Duration>,
    strict: bool,
    fabrics: FabricOptions,
}

impl OpenOptions {
    /// Sets the backend inside a machine, which must be equal on all ranks of the machine.
    /// [`Rdma`](Backend::Rdma) serves all ranks.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Sets the GPU of this rank by its number in the driver. By default, it is the rank's index on its machine, and ranks share
    /// GPUs if there are fewer.
    #[must_use]
    pub fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// Sets the backend between nodes, which must be equal on all ranks. By default it is RDMA between
    /// machines, and a second fabric of the same backend between nodes of one machine.
    #[must_use]
    pub fn network(mut self, backend: Backend) -> Self {
        self.network = Some(backend);
        self
    }

    /// Sets which ranks form a node; the topology must be equal on all ranks. By default, the ranks of a
    /// machine are a node.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Sets options of the backends, such as the NICs of this rank.
    #[must_use]
    pub fn fabrics(mut self, options: FabricOptions) -> Self {
        self.fabrics = options;
        self
    }

    /// Sets the timeout for opening the group and the default timeout of its operations; initially 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets whether using a slower [fallback](crate::group::Fallback) is an error.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Opens the group of the launcher, or a group of one rank if there is no launcher. Collective.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), naming the variable of the environment; otherwise as
    /// [`open`](Self::open).
    pub fn from_env(self) -> Result<Group, Error> {
        match Environment::from_env()? {
            Some(environment) => {
                let deadline = Deadline::after(self.timeout.unwrap_or(TIMEOUT));
                self.open(TcpBootstrap::join(&environment, deadline)?)
            }
            None => {
                let mut alone = in_process::group(1)?;
                self.open(alone.remove(0))
            }
        }
    }

    /// Opens a group of all ranks that the bootstrap connects. Collective.
    ///
    /// # Errors
    /// As [`open_fabrics`](Self::open_fabrics) and [`GroupOptions::open`].
    pub fn open(self, bootstrap: impl Bootstrap + 'static) -> Result<Group, Error> {
        self.open_fabrics(&bootstrap)?.into_group(bootstrap)
    }

    /// Opens the fabrics of this rank without making them a group, for example to put layers around them.
    /// Collective.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if a backend was not built in, or a device or library is missing;
    /// [`Mismatch`](ErrorKind::Mismatch) if ranks of a machine name different backends;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if backends or nodes do not fit the machines.
    pub fn open_fabrics(self, bootstrap: &impl Bootstrap) -> Result<Fabrics, Error> {
        let timeout = self.timeout.unwrap_or(TIMEOUT);
        let survey = Survey::for_request(self.backend);
        let own = RankDevices::of(&survey, self.backend, bootstrap.host());
        let all = bootstrap.exchange("backends", &own.encode(), Deadline::after(timeout))?;
        let decode = |(index, bytes): (usize, &Vec<u8>)| {
            RankDevices::decode(bytes).map_err(|error| {
                let peer = Rank::at(index);
                let text = format!("cannot decode the list of backends of rank {peer}: {error}; run the same Peerlane on all ranks");
                Error::new(ErrorKind::Mismatch, text).with_peer(peer)
            })
        };
        let all = all.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        let (me, ranks) = (bootstrap.rank(), all.len());
        let (choice, topology) = select(&self, &survey, &all, me)?;
        let mut options = self.fabrics;
        if let Some(ordinal) = choice.device {
            options.set_device(ordinal);
        }
        if self.strict {
            options.set_strict();
        }
        if all.iter().all(|found| found.host == all[0].host) {
            options.stay_on_machine();
        }
        let local = options.open(choice.local, me, ranks)?;
        let network = choice.network.map(|network| options.open_second(&local, network, me, ranks));
        let group_options =
            GroupOptions::default().timeout(timeout).strict(self.strict).topology(topology);
        let group_options = group_options.selected(choice.device, choice.reasons);
        Ok(Fabrics { network: network.transpose()?, local, group_options })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct RankDevices {
    /// The number of CUDA devices of the rank; 0 also if they cannot be used.
    cuda: u32,
    rocm: u32,
    rdma: u32,
    requested: Option<Backend>,
    host: String,
}

impl RankDevices {
    fn of(survey: &Survey, requested: Option<Backend>, host: &str) -> Self {
        let count = |devices: &Result<Vec<Device>, String>| {
            devices.as_ref().map_or(0, |devices| Rank::at(devices.len()).0)
        };
        let (cuda, rocm, rdma) = (count(&survey.cuda), count(&survey.rocm), count(&survey.rdma));
        Self { cuda, rocm, rdma, requested, host: host.to_owned() }
    }

    fn encode(&self) -> Vec<u8> {
        let requested = self.requested.map_or("", Backend::name);
        let writer = Writer::new().u32(self.cuda).u32(self.rocm).u32(self.rdma);
        let writer = writer.u32(Rank::at(requested.len()).0).bytes(requested.as_bytes());
        writer.bytes(self.host.as_bytes()).finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let truncated = |error: Truncated| Error::new(ErrorKind::Mismatch, error.to_string());
        let mut reader = Reader::new(bytes);
        let mut number = |field| reader.u32(field).map_err(truncated);
        let (cuda, rocm, rdma) = (number("cuda")?, number("rocm")?, number("rdma")?);
        let length = number("length of the backend")? as usize;
        let name = reader.bytes("backend", length).map_err(truncated)?;
        let requested = match &*String::from_utf8_lossy(name) {
            "" => None,
            name => Some(name.parse()?),
        };
        let host = String::from_utf8_lossy(reader.rest()).into_owned();
        Ok(Self { cuda, rocm, rdma, requested, host })
    }

    fn count(&self, backend: Backend) -> u32 {
        match backend {
            Backend::Host => 1,
            Backend::Cuda => self.cuda,
            Backend::Rocm => self.rocm,
            Backend::Rdma => self.rdma,
        }
    }
}

/// Chooses the backends, the GPU and the topology of one rank, so that ranks of one machine get the same
/// backends.
fn select(
    options: &OpenOptions,
    survey: &Survey,
    all: &[RankDevices],
    me: Rank,
) -> Result<(Choice, Topology), Error> {
    let own = &all[me.index()];
    let mates: Vec<usize> = (0..all.len()).filter(|&rank| all[rank].host == own.host).collect();
    let several_hosts = mates.len() < all.len();
    if let Some(&other) = mates.iter().find(|&&rank| all[rank].requested != own.requested) {
        let name = |requested: Option<Backend>| requested.map_or("automatic", Backend::name);
        let text = format!(
            "ranks of one machine request different backends: {} on rank {other}, {} on rank {me}; request the same backend on both",
            name(all[other].requested),
            name(own.requested)
        );
        return Err(Error::new(ErrorKind::Mismatch, text).with_peer(Rank::at(other)));
    }
    let (local, mut reasons) = match own.requested {
        Some(backend) => (backend, Vec::new()),
        None => {
            let least = |backend, devices: &Result<Vec<Device>, String>| {
                let fewest = mates.iter().min_by_key(|&&rank| all[rank].count(backend));
                let rank = *fewest.expect("this rank is on its own machine");
                match (all[rank].count(backend), devices) {
                    (0, Ok(_)) => Err(format!("rank {rank} found no GPU")),
                    (count, Ok(devices)) => Ok(devices[..count as usize].to_vec()),
                    (_, Err(reason)) => Err(reason.clone()),
                }
            };
            let common = Survey {
                cuda: least(Backend::Cuda, &survey.cuda),
                rocm: least(Backend::Rocm, &survey.rocm),
                rdma: survey.rdma.clone(),
            };
            common.choose_local(Some(mates.len()), several_hosts)
        }
    };
    local.check_built_in()?;
    let missing = match (local, survey) {
        (Backend::Cuda, Survey { cuda: Err(reason), .. })
        | (Backend::Rocm, Survey { rocm: Err(reason), .. })
        | (Backend::Rdma, Survey { rdma: Err(reason), .. }) => Some(reason),
        _ => None,
    };
    if let Some(reason) = missing {
        let text = format!("cannot open the backend {local}: {reason}");
        return Err(Error::new(ErrorKind::Unavailable, text));
    }
    let gpus = match local {
        Backend::Cuda => survey.cuda.as_deref().unwrap_or_default(),
        Backend::Rocm => survey.rocm.as_deref().unwrap_or_default(),
        Backend::Host | Backend::Rdma => &[],
    };
    let index = mates.iter().position(|&rank| rank == me.index()).unwrap_or(0);
    let device = match options.device {
        Some(ordinal) => Some(ordinal).filter(|_| !gpus.is_empty()),
        None => index.checked_rem(gpus.len()).map(|index| gpus[index].ordinal),
    };
    let machines = machines(all)?;
    let topology = options.topology.clone().unwrap_or_else(|| machines.clone());
    let network = select_network(options.network, local, &topology, &machines)?;
    if network == Some(Backend::Rdma) {
        Backend::Rdma.check_built_in()?;
        if let Some(rank) = all.iter().position(|found| found.rdma == 0) {
            let reason = match &survey.rdma {
                Err(reason) if rank == me.index() => format!(": {reason}"),
                _ => String::new(),
            };
            let text = format!(
                "rank {rank} on {} has no usable RDMA device{reason}; RDMA between {} nodes needs one on each machine: \
                 install rdma-core, and run `peerlane doctor` for details",
                all[rank].host,
                topology.nodes()
            );
            return Err(Error::new(ErrorKind::Unavailable, text).with_peer(Rank::at(rank)));
        }
        if options.network.is_none() {
            reasons.push(format!("rdma: the ranks are on {} machines", machines.nodes()));
        }
    }
    Ok((Choice { local, device, network, reasons }, topology))
}

fn select_network(
    requested: Option<Backend>,
    local: Backend,
    topology: &Topology,
    machines: &Topology,
) -> Result<Option<Backend>, Error> {
    let refuse = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    if topology.ranks() != machines.ranks() {
        let (given, ranks) = (topology.ranks(), machines.ranks());
        return refuse(format!("the topology has {given} ranks, expected {ranks}"));
    }
    if topology.nodes() == 1 || (local == Backend::Rdma && requested.is_none()) {
        return match requested {
            Some(network) if topology.nodes() == 1 => refuse(format!(
                "{network} is to connect nodes, but all ranks are on one node; set a topology or remove the network"
            )),
            _ if local != Backend::Rdma && machines.nodes() > 1 => refuse(format!(
                "the topology has one node, but the ranks are on {} machines, which {local} does not connect",
                machines.nodes()
            )),
            _ => Ok(None),
        };
    }
    let default = if machines.nodes() > 1 { Backend::Rdma } else { local };
    let network = requested.unwrap_or(default);
    if network != Backend::Rdma && machines.nodes() > 1 {
        let machines = machines.nodes();
        return refuse(format!(
            "the ranks are on {machines} machines, which {network} does not connect; use rdma"
        ));
    }
    Ok(Some(network))
}

fn machines(all: &[RankDevices]) -> Result<Topology, Error> {
    Topology::by_key(all.iter().map(|found| &found.host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(count: u32) -> Result<Vec<Device>, String> {
        Ok((0..count).map(|ordinal| Device::new(ordinal, format!("gpu{ordinal}"))).collect())
    }

    fn missing() -> Result<Vec<Device>, String> {
        Err("the library is missing".to_owned())
    }

    fn survey(cuda: Result<Vec<Device>, String>, rocm: Result<Vec<Device>, String>) -> Survey {
        Survey { cuda, rocm, rdma: missing() }
    }

    fn found(host: &str, cuda: u32, rdma: u32) -> RankDevices {
        RankDevices { cuda, rocm: 0, rdma, requested: None, host: host.to_owned() }
    }

    #[test]
    fn names_are_parsed() {
        for backend in Backend::ALL {
            assert_eq!(backend.name().parse::<Backend>().unwrap(), backend);
        }
        let error = "cud".parse::<Backend>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown backend \"cud\", expected one of host, cuda, rocm, rdma"
        );
    }

    #[test]
    fn what_a_rank_has_found_survives_encoding() {
        for requested in [None, Some(Backend::Rocm)] {
            let found = RankDevices { requested, ..found("node7", 8, 2) };
            let bytes = found.encode();
            assert_eq!(RankDevices::decode(&bytes).unwrap(), found);
            for end in 0..16 {
                assert!(RankDevices::decode(&bytes[..end]).is_err(), "{end} bytes");
            }
        }
    }

    #[cfg(all(feature = "cuda", feature = "rocm"))]
    #[test]
    fn gpus_are_chosen_if_each_rank_has_its_own() {
        let choose = |survey: Survey, ranks, several| {
            let (backend, reasons) = survey.choose_local(ranks, several);
            format!("{backend} ({})", reasons.join("; "))
        };
        assert_eq!(choose(survey(gpus(4), missing()), Some(4), false), "cuda (4 GPUs)");
        assert_eq!(choose(survey(gpus(4), missing()), None, false), "cuda (4 GPUs)");
        assert_eq!(choose(survey(missing(), gpus(2)), Some(2), false), "rocm (2 GPUs)");
        assert_eq!(choose(survey(gpus(1), missing()), Some(1), true), "cuda (1 GPU)");
        assert_eq!(
            choose(survey(gpus(1), missing()), None, false),
            "host (cuda: 1 GPU, expected 2 or more; rocm: the library is missing)"
        );
        assert_eq!(
            choose(survey(gpus(4), gpus(8)), Some(8), false),
            "rocm (8 GPUs)",
            "the backend that has a GPU for each rank"
        );
        assert_eq!(
            choose(survey(gpus(4), missing()), Some(8), false),
            "host (cuda: 4 GPUs for 8 ranks; select the backend cuda explicitly to share GPUs; rocm: the library is missing)"
        );
    }

    #[cfg(all(feature = "cuda", feature = "rdma"))]
    #[test]
    fn ranks_of_a_machine_choose_alike() {
        let options = OpenOptions::default();
        let own = Survey { cuda: gpus(2), rocm: missing(), rdma: gpus(1) };
        let all = ["a", "b", "a", "b"].map(|host| found(host, 2, 1));
        let choice = |rank, all: &[RankDevices]| {
            select(&options, &own, all, Rank(rank)).map(|(choice, _)| choice)
        };
        let chosen = choice(2, &all).unwrap();
        assert_eq!((chosen.local, chosen.device), (Backend::Cuda, Some(1)));
        assert_eq!(chosen.network, Some(Backend::Rdma));
        assert_eq!(chosen.reasons, ["2 GPUs", "rdma: the ranks are on 2 machines"]);
        // Rank 2 sees no GPU, so rank 0 does without its own.
        let mut fewer = all.clone();
        fewer[2].cuda = 0;
        let chosen = choice(0, &fewer).unwrap();
        assert_eq!((chosen.local, chosen.device), (Backend::Host, None));
        assert!(chosen.reasons[0].starts_with("cuda: rank 2 found no GPU"), "{chosen:?}");
        let mut without = all.clone();
        without[3].rdma = 0;
        let error = choice(0, &without).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Unavailable, Some(Rank(3))));
        let mut differ = all;
        differ[2].requested = Some(Backend::Host);
        let error = choice(0, &differ).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(2))));
    }

    #[test]
    fn the_network_fits_nodes_and_machines() {
        let network = |requested, local, nodes: &[u32], machines: &[u32]| {
            let of = |nodes| Topology::of_nodes(nodes).unwrap();
            select_network(requested, local, &of(nodes), &of(machines))
                .map_err(|error| error.to_string())
        };
        let (host, rdma) = (Backend::Host, Backend::Rdma);
        assert_eq!(network(None, host, &[0, 0], &[0, 0]), Ok(None));
        assert_eq!(network(None, host, &[0, 1], &[0, 0]), Ok(Some(host)));
        assert_eq!(network(Some(rdma), host, &[0, 1], &[0, 0]), Ok(Some(rdma)));
        assert_eq!(network(None, host, &[0, 1], &[0, 1]), Ok(Some(rdma)));
        assert_eq!(network(None, rdma, &[0, 1], &[0, 1]), Ok(None));
        assert_eq!(network(Some(rdma), rdma, &[0, 1], &[0, 1]), Ok(Some(rdma)));
        let refusals = [
            (network(Some(rdma), host, &[0, 0], &[0, 0]), "all ranks are on one node"),
            (network(Some(host), host, &[0, 1], &[0, 1]), "which host does not connect; use rdma"),
            (network(None, host, &[0, 0], &[0, 1]), "which host does not connect"),
            (network(None, host, &[0, 0, 0], &[0, 0]), "the topology has 3 ranks, expected 2"),
        ];
        for (refusal, text) in refusals {
            assert!(
                refusal.as_ref().is_err_and(|error| error.contains(text)),
                "{refusal:?}: {text}"
            );
        }
    }

    #[cfg(feature = "host")]
    #[test]
    fn nodes_of_one_machine_have_a_second_fabric() {
        in_process::run(4, |bootstrap| {
            let options = OpenOptions::default().backend(Backend::Host);
            let topology = Topology::of_nodes(&[0, 0, 1, 1])?;
            let mut group = options.topology(topology).open(bootstrap)?;
            assert_eq!(group.selection().network, Some(peerlane_hal::BackendId::HOST));
            let mut gather = group.all_gather::<u8>(1).prepare()?;
            gather.input_mut()?[0] = 7;
            gather.run()?;
            assert_eq!(gather.output()?, [7; 4]);
            drop(gather);
            group.close()
        })
        .unwrap();
    }

    #[cfg(feature = "host")]
    #[test]
    fn a_group_opens_without_naming_a_type() {
        in_process::run(3, |bootstrap| {
            let options = OpenOptions::default().backend(Backend::Host);
            let mut group = options.open(bootstrap)?;
            assert_eq!(group.selection().to_string(), "host");
            let mut gather = group.all_gather::<u8>(1).prepare()?;
            gather.input_mut()?[0] = 7;
            gather.run()?;
            assert_eq!(gather.output()?, [7, 7, 7]);
            drop(gather);
            group.close()
        })
        .unwrap();
    }

    #[cfg(not(feature = "rdma"))]
    #[test]
    fn a_backend_that_is_not_built_in_names_the_feature() {
        let error = in_process::run(1, |bootstrap| {
            OpenOptions::default().backend(Backend::Rdma).open(bootstrap).map(drop)
        });
        assert!(error.unwrap_err().to_string().contains("enable the feature `rdma`"));
    }
}
