//! Opens a group of ranks on the best fabrics of the machine.
//!
//! [`from_env`] is enough for most programs. [`OpenOptions`] names a backend, a device or the
//! options of the group instead. [`Group::selection`] says what was chosen and why. A [`Survey`]
//! shows what the machine has without opening anything.

use std::collections::BTreeSet;
use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::bootstrap::{AbortRecord, Bootstrap, in_process};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, ErrorKind, Rank};

use crate::{Error, Group, GroupOptions};

mod expected_ranks;
mod fabrics;
mod networks;
mod rank_devices;
mod survey;

use expected_ranks::{NO_LAUNCHER, check_connected_ranks, check_launched_ranks};
pub use fabrics::{FabricOptions, Fabrics};
use networks::{needed_networks, select_network};
use rank_devices::RankDevices;
pub use survey::{Backend, Device, NoGpus, Survey};
use survey::{GpuCount, choose, gpus_text};

/// The least time that ranks wait for each other when they start, unless the caller sets one.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Opens the group of the launcher (torchrun, mpirun or srun) on the best fabrics of the machines.
/// Collective.
///
/// Without a launcher, the group has one rank. [`OpenOptions`] describes the choice.
/// [`Group::selection`] returns the choice, and says if there was no launcher.
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

/// Options for opening a group, such as its backend and device.
///
/// By default, the ranks of a machine use its GPUs, one each, or host memory if it has no driver or
/// no GPU. Unless the caller names a [backend](Self::backend), it is an error on all ranks if a
/// driver does not work, or if one rank sees no GPU and another does, or if the ranks of a machine
/// see fewer GPUs than they are; ranks may see different GPUs. Ranks on several machines use the
/// first of [`Backend::NETWORKS`] between them that every rank has. All ranks choose alike, because
/// they exchange what they have found.
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
    group: GroupOptions,
    backend: Option<Backend>,
    device: Option<u32>,
    network: Option<Backend>,
    fabrics: FabricOptions,
    ranks: Option<usize>,
    /// Why the group has one rank; empty if a launcher or the caller has set the number.
    reasons: Vec<String>,
}

impl OpenOptions {
    /// Sets the options of the group, such as its timeout and topology.
    ///
    /// By default, the timeout for opening the group is 120 s, or that of operations if that is
    /// longer. Launchers start ranks far apart, and drivers take seconds to start, so it should be
    /// longer than the timeout of operations. With
    /// [`strict`](GroupOptions::strict), it is also an error if a fabric needs a slower fallback.
    ///
    /// ```
    /// # #[cfg(feature = "host")] {
    /// use std::time::Duration;
    /// use peerlane::{Backend, GroupOptions, OpenOptions};
    ///
    /// let options = GroupOptions::default().timeout(Duration::from_secs(5)).progress_thread(true);
    /// let group = OpenOptions::default().backend(Backend::Host).group(options).from_env()?;
    /// group.close()?;
    /// # }
    /// # Ok::<(), peerlane::Error>(())
    /// ```
    #[must_use]
    pub fn group(mut self, options: GroupOptions) -> Self {
        self.group = options;
        self
    }

    /// Sets the backend inside a machine, which must be equal on all ranks of the machine.
    /// [`Host`](Backend::Host) uses host memory also on a machine with GPUs,
    /// [`Cuda`](Backend::Cuda) and [`Rocm`](Backend::Rocm) let ranks share GPUs, and a
    /// [network](Backend::NETWORKS) serves the ranks of all machines alone.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Sets the GPU of this rank by its number in the driver. By default, it is the rank's index on
    /// its machine, and ranks share GPUs if there are fewer.
    #[must_use]
    pub fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// Sets the backend between nodes, which must be equal on all ranks. By default it is the first
    /// of [`Backend::NETWORKS`] that every rank has between machines, and a second fabric of the
    /// same backend between nodes of one machine.
    #[must_use]
    pub fn network(mut self, backend: Backend) -> Self {
        self.network = Some(backend);
        self
    }

    /// Sets options of the backends, such as the network devices of this rank.
    #[must_use]
    pub fn fabrics(mut self, options: FabricOptions) -> Self {
        self.fabrics = options;
        self
    }

    fn start_deadline(&self) -> Deadline {
        Deadline::after(self.group.start_timeout_at_least(START_TIMEOUT))
    }

    /// Sets the number of ranks that the group must have; another number is an error, before any
    /// wait. By default, every number is right.
    ///
    /// A process whose launcher's variables were removed cannot be told from a single process, and
    /// becomes a group of one rank without this option.
    #[must_use]
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// Opens the group of the launcher, or a group of one rank if there is no launcher. Collective.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), naming the variable of the environment, or
    /// the variable that gives another number of ranks than [`ranks`](Self::ranks); otherwise as
    /// [`open`](Self::open).
    pub fn from_env(mut self) -> Result<Group, Error> {
        let environment = Environment::from_env()?;
        check_launched_ranks(self.ranks, environment.as_ref())?;
        match environment {
            Some(environment) => {
                let bootstrap = TcpBootstrap::join(&environment, self.start_deadline())?;
                self.open(bootstrap)
            }
            None => {
                self.reasons.push(NO_LAUNCHER.to_owned());
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

    /// Opens the fabrics of this rank without making them a group, for example to put layers around
    /// them. Collective.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if a backend was not built in, a device or library
    /// is missing, no backend was named and some rank cannot have a GPU of its own on a machine
    /// with GPUs, or no network connects the machines of all ranks;
    /// [`Mismatch`](ErrorKind::Mismatch) if ranks of a machine name different backends;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if backends or nodes do not fit the
    /// machines, or the bootstrap connects another number of ranks than [`ranks`](Self::ranks).
    pub fn open_fabrics(self, bootstrap: &impl Bootstrap) -> Result<Fabrics, Error> {
        check_connected_ranks(self.ranks, bootstrap.ranks())?;
        let start = self.start_deadline();
        let survey = Survey::for_request(self.backend);
        let requested = (self.backend, self.network);
        let own = RankDevices::from_survey(&survey, requested, bootstrap.host());
        let all = bootstrap.exchange("backends", &own.encode(), start)?;
        let decode = |(index, bytes): (usize, &Vec<u8>)| {
            RankDevices::decode(bytes).map_err(|error| {
                let peer = Rank::at(index);
                let text = format!("cannot decode the list of backends of rank {peer}: {error}; run the same Peerlane on all ranks");
                Error::new(ErrorKind::Mismatch, text).with_peer(peer)
            })
        };
        let mut all = all.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        exchange_networks(bootstrap, &mut all, start)?;
        let (me, ranks) = (bootstrap.rank(), all.len());
        let (mut choice, topology) = select(&self, &survey, &all, me)?;
        choice.reasons.extend(self.reasons);
        let mut options = self.fabrics;
        if let Some(ordinal) = choice.device {
            options.set_device(ordinal);
        }
        if self.group.is_strict() {
            options.set_strict();
        }
        if all.iter().all(|found| found.host == all[0].host) {
            options.stay_on_machine();
        }
        let opened = options.open(choice.local, me, ranks).and_then(|local| {
            let network = choice.network;
            let network = network.map(|network| options.open_second(&local, network, me, ranks));
            Ok((local, network.transpose()?))
        });
        // The other ranks wait for this one, so they get the reason. If it cannot be sent, they
        // learn that this rank is lost.
        let (local, network) = opened.inspect_err(|error| {
            let record = AbortRecord::failed(me, error.kind(), error);
            let _ = bootstrap.abort(&record.encode());
        })?;
        let group = self.group.topology(topology).start_timeout(start.timeout());
        let group = group.selected(choice.device, choice.reasons);
        Ok(Fabrics { network, local, group })
    }
}

/// Exchanges which ranks have the networks that they may need, up to the first that all have.
fn exchange_networks(
    bootstrap: &impl Bootstrap,
    all: &mut [RankDevices],
    start: Deadline,
) -> Result<(), Error> {
    for network in needed_networks(all, machines(all)?.nodes()) {
        let reason = Survey::of_network(network).err().unwrap_or_default();
        let reasons = bootstrap.exchange(network.name(), reason.as_bytes(), start)?;
        for (found, reason) in all.iter_mut().zip(&reasons) {
            found.set_network(network, reason);
        }
        // If a rank has asked for several networks, each of them is needed.
        let is_asked_for = |found: &RankDevices| {
            [found.requested, found.requested_network]
                .into_iter()
                .flatten()
                .any(Backend::is_network)
        };
        if reasons.iter().all(Vec::is_empty) && !all.iter().any(is_asked_for) {
            break;
        }
    }
    Ok(())
}

/// Chooses the backends, the GPU and the topology of one rank, so that ranks of one machine get the
/// same backends.
fn select(
    options: &OpenOptions,
    survey: &Survey,
    all: &[RankDevices],
    me: Rank,
) -> Result<(Choice, Topology), Error> {
    for backend in [options.backend, options.network].into_iter().flatten() {
        backend.check_built_in()?;
    }
    let machines = machines(all)?;
    // Each rank chooses for all machines, so that all ranks return the same error.
    let nodes = 0..Rank::at(machines.nodes()).0;
    let mut chosen = nodes
        .map(|node| choose_on_machine(all, machines.members(node)))
        .collect::<Result<Vec<_>, _>>()?;
    let (local, mut reasons) = chosen.swap_remove(machines.node(me) as usize);
    let gpus = match local {
        Backend::Cuda => survey.cuda.as_deref().unwrap_or_default(),
        Backend::Rocm => survey.rocm.as_deref().unwrap_or_default(),
        _ => &[],
    };
    let device = match options.device {
        Some(ordinal) => Some(ordinal).filter(|_| !gpus.is_empty()),
        None => {
            let own = own_gpus(all, machines.members(machines.node(me)), local);
            let index = machines.local_index(me);
            let shared = || index.checked_rem(gpus.len());
            own.map(|own| own[index]).or_else(shared).map(|index| gpus[index].ordinal)
        }
    };
    let topology = options.group.given_topology().unwrap_or(&machines).clone();
    let (network, why) = select_network(options.network, local, &topology, &machines, all)?;
    reasons.extend(why);
    Ok((Choice { local, device, network, reasons }, topology))
}

/// Chooses the backend of the ranks `mates`, which are all ranks of one machine. Returns it with
/// the reasons.
fn choose_on_machine(all: &[RankDevices], mates: &[Rank]) -> Result<(Backend, Vec<String>), Error> {
    let found = |rank: Rank| &all[rank.index()];
    let requested = found(mates[0]).requested;
    if let Some(&other) = mates.iter().find(|&&rank| found(rank).requested != requested) {
        let name = |requested: Option<Backend>| requested.map_or("automatic", Backend::name);
        let text = format!(
            "ranks of one machine request different backends: {} on rank {other}, {} on rank {}; request the same backend on both",
            name(found(other).requested),
            name(requested),
            mates[0]
        );
        return Err(Error::new(ErrorKind::Mismatch, text).with_peer(other));
    }

    let Some(backend) = requested else { return choose_automatically(all, mates) };
    let lacks = |&rank: &Rank| Some((rank, found(rank).reason_without(backend)?));
    let Some((rank, reason)) = mates.iter().find_map(lacks) else {
        return Ok((backend, Vec::new()));
    };
    let host = &found(rank).host;
    let text = format!("cannot open the backend {backend} on rank {rank} ({host}): {reason}");
    Err(Error::new(ErrorKind::Unavailable, text).with_peer(rank))
}

/// Returns the position of each rank's GPU among those that the rank sees, so that no two ranks of
/// a machine have the same GPU; `None` if that is not possible.
fn own_gpus(all: &[RankDevices], mates: &[Rank], backend: Backend) -> Option<Vec<usize>> {
    let seen = mates.iter().map(|rank| all[rank.index()].gpus(backend)?.as_ref().ok());
    let seen: Vec<_> = seen.collect::<Option<_>>()?;
    let (mut taken, mut own) = (BTreeSet::new(), vec![0; mates.len()]);
    // Ranks that see few GPUs have the first choice.
    let mut order: Vec<_> = (0..mates.len()).collect();
    order.sort_by_key(|&mate| seen[mate].len());
    for mate in order {
        own[mate] = seen[mate].iter().position(|name| taken.insert(name))?;
    }
    Some(own)
}

/// Chooses GPUs for all ranks of a machine, or host memory if none of them sees a GPU or a broken
/// driver.
fn choose_automatically(
    all: &[RankDevices],
    mates: &[Rank],
) -> Result<(Backend, Vec<String>), Error> {
    let gpus = |backend| {
        let gpus = move |&rank: &Rank| Some((rank, all[rank.index()].gpus(backend)?));
        mates.iter().filter_map(gpus)
    };
    // The rank that sees the least decides for all: one with a broken driver before one without
    // GPUs.
    let order = |gpus: &Result<Vec<String>, NoGpus>| match gpus {
        Err(NoGpus::Broken(_)) => 0,
        Err(NoGpus::Absent(_)) => 1,
        Ok(names) => names.len() + 2,
    };
    let least =
        |backend| gpus(backend).min_by_key(|(_, gpus)| order(gpus)).expect("no machine is empty");
    // Ranks that see only their own GPU see fewer than their machine has.
    let count = |backend| -> GpuCount {
        let least = least(backend).1.as_ref().map(Vec::len).map_err(NoGpus::clone)?;
        let each = own_gpus(all, mates, backend).map_or(0, |own| own.len());
        Ok(least.max(each))
    };
    let host = &all[mates[0].index()].host;
    let (rank, text) = match choose(&count(Backend::Cuda), &count(Backend::Rocm), Some(mates.len()))
    {
        Err((backend, reason)) => {
            let (rank, _) = least(backend);
            let text = format!(
                "the driver of the backend {backend} does not work on rank {rank} ({host}): {reason}; \
                 repair the driver, or set `OpenOptions::backend` to `Backend::Host` to use host memory"
            );
            (rank, text)
        }
        Ok((Backend::Host, reasons)) => {
            let sees_gpus = |backend| {
                gpus(backend).find_map(|(rank, gpus)| Some((backend, rank, gpus.as_ref().ok()?)))
            };
            let seen = [Backend::Cuda, Backend::Rocm].into_iter().find_map(sees_gpus);
            let Some((backend, other, names)) = seen else { return Ok((Backend::Host, reasons)) };
            let (rank, fewest) = least(backend);
            let sees = match fewest {
                Err(reason) => format!(
                    "no GPU of the backend {backend}, but rank {other} sees {}: {reason}; let all ranks see GPUs, or set \
                     `OpenOptions::backend` to `Backend::Host` to use host memory",
                    gpus_text(names.len())
                ),
                Ok(names) => format!(
                    "{} of the backend {backend} for {} ranks; start one rank per GPU, or set `OpenOptions::backend` to \
                     `Backend::{backend:?}` if ranks share GPUs, or to `Backend::Host` to use host memory",
                    gpus_text(names.len()),
                    mates.len()
                ),
            };
            (rank, format!("rank {rank} ({host}) sees {sees}"))
        }
        Ok(chosen) => return Ok(chosen),
    };
    let text = format!("cannot select a backend: {text}");
    Err(Error::new(ErrorKind::Unavailable, text).with_peer(rank))
}

fn machines(all: &[RankDevices]) -> Result<Topology, Error> {
    Topology::by_key(all.iter().map(|found| &found.host))
}

#[cfg(test)]
mod tests {
    use super::rank_devices::found;
    use super::*;

    #[cfg(all(feature = "cuda", feature = "rdma"))]
    fn gpus(count: u32) -> Vec<Device> {
        (0..count).map(|ordinal| Device::new(ordinal, format!("gpu{ordinal}"))).collect()
    }

    fn names(gpus: impl Iterator<Item = usize>) -> Vec<String> {
        gpus.map(|number| format!("gpu{number}")).collect()
    }

    fn absent<T>() -> Result<T, NoGpus> {
        Err(NoGpus::Absent("the library is missing".to_owned()))
    }

    fn broken<T>() -> Result<T, NoGpus> {
        Err(NoGpus::Broken("no interrupts".to_owned()))
    }

    #[cfg(feature = "cuda")]
    fn survey(cuda: Result<Vec<Device>, NoGpus>) -> Survey {
        Survey { cuda, rocm: absent(), ..Survey::for_request(Some(Backend::Host)) }
    }

    #[test]
    fn names_are_parsed() {
        for backend in Backend::ALL {
            assert_eq!(backend.name().parse::<Backend>().unwrap(), backend);
        }
        let error = "cud".parse::<Backend>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown backend \"cud\", expected one of host, cuda, rocm, rdma, ucx"
        );
    }

    #[test]
    fn what_a_rank_has_found_survives_encoding() {
        for requested in [None, Some(Backend::Rocm)] {
            for cuda in [Ok(names(0..8)), absent(), broken()] {
                let found = found("node7", 0, &[Backend::Rdma]);
                let requested_network = requested.map(|_| Backend::Ucx);
                let found = RankDevices { requested, requested_network, cuda, ..found };
                let bytes = found.encode();
                let mut decoded = RankDevices::decode(&bytes).unwrap();
                decoded.set_network(Backend::Rdma, b"");
                decoded.set_network(Backend::Ucx, b"ucx is missing; install ucx");
                assert_eq!(decoded, found);
                for end in 0..bytes.len() - found.host.len() {
                    assert!(RankDevices::decode(&bytes[..end]).is_err(), "{end} bytes");
                }
            }
        }
        let mut bytes = found("node7", 8, &[]).encode();
        bytes[0] = 3;
        let error = RankDevices::decode(&bytes).unwrap_err();
        assert_eq!(error.to_string(), "the tag of the field cuda is 3, expected 0, 1 or 2");
    }

    #[cfg(all(feature = "cuda", feature = "rocm"))]
    #[test]
    fn gpus_are_chosen_if_each_rank_has_its_own() {
        let choose = |cuda, rocm, ranks| match choose(&cuda, &rocm, ranks) {
            Ok((backend, reasons)) => format!("{backend} ({})", reasons.join("; ")),
            Err((backend, reason)) => format!("no choice: {backend}: {reason}"),
        };
        assert_eq!(choose(Ok(4), absent(), Some(4)), "cuda (4 GPUs)");
        assert_eq!(choose(Ok(4), absent(), None), "cuda (4 GPUs)");
        assert_eq!(choose(absent(), Ok(2), Some(2)), "rocm (2 GPUs)");
        assert_eq!(choose(Ok(1), absent(), Some(1)), "cuda (1 GPU)");
        assert_eq!(
            choose(Ok(1), absent(), None),
            "host (cuda: 1 GPU, expected 2 or more; rocm: the library is missing)"
        );
        assert_eq!(
            choose(Ok(4), Ok(8), Some(8)),
            "rocm (8 GPUs)",
            "the backend that has a GPU for each rank"
        );
        assert_eq!(
            choose(Ok(4), absent(), Some(8)),
            "host (cuda: 4 GPUs for 8 ranks; select the backend cuda explicitly to share GPUs; rocm: the library is missing)"
        );
        assert_eq!(
            choose(absent(), absent(), Some(8)),
            "host (cuda: the library is missing; rocm: the library is missing)"
        );
        assert_eq!(choose(broken(), absent(), Some(2)), "no choice: cuda: no interrupts");
        assert_eq!(choose(Ok(1), broken(), Some(2)), "no choice: rocm: no interrupts");
        assert_eq!(choose(Ok(2), broken(), Some(2)), "cuda (2 GPUs)");
        assert_eq!(choose(broken(), Ok(2), Some(2)), "rocm (2 GPUs; cuda: no interrupts)");
    }

    #[cfg(all(feature = "cuda", feature = "rdma"))]
    #[test]
    fn ranks_of_a_machine_choose_alike() {
        let options = OpenOptions::default();
        let own = survey(Ok(gpus(2)));
        let all = ["a", "b", "a", "b"].map(|host| found(host, 2, &[Backend::Rdma]));
        let choice = |rank, all: &[RankDevices]| {
            select(&options, &own, all, Rank(rank)).map(|(choice, _)| choice)
        };
        let chosen = choice(2, &all).unwrap();
        assert_eq!((chosen.local, chosen.device), (Backend::Cuda, Some(1)));
        assert_eq!(chosen.network, Some(Backend::Rdma));
        assert_eq!(chosen.reasons, ["2 GPUs", "rdma: the ranks are on 2 machines"]);
        let mut differ = all;
        differ[2].requested = Some(Backend::Host);
        let error = choice(0, &differ).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(2))));
    }

    #[cfg(all(feature = "cuda", feature = "rdma"))]
    #[test]
    fn all_ranks_return_the_error_of_a_rank_that_cannot_have_a_gpu() {
        let options = OpenOptions::default();
        let own = survey(Ok(gpus(2)));
        let error = |change: fn(&mut RankDevices)| {
            let mut all = ["a", "b", "a", "b"].map(|host| found(host, 2, &[Backend::Rdma]));
            change(&mut all[3]);
            let errors = [0, 1, 2, 3].map(|rank| {
                let error = select(&options, &own, &all, Rank(rank)).unwrap_err();
                assert_eq!((error.kind(), error.peer()), (ErrorKind::Unavailable, Some(Rank(3))));
                error.to_string()
            });
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:#?}");
            errors[0].clone()
        };
        assert_eq!(
            error(|found| found.cuda = broken()),
            "cannot select a backend: the driver of the backend cuda does not work on rank 3 (b): no interrupts; repair the driver, or set `OpenOptions::backend` to `Backend::Host` to use host memory"
        );
        assert_eq!(
            error(|found| found.cuda = absent()),
            "cannot select a backend: rank 3 (b) sees no GPU of the backend cuda, but rank 1 sees 2 GPUs: the library is missing; let all ranks see GPUs, or set `OpenOptions::backend` to `Backend::Host` to use host memory"
        );
        let all = [2, 1, 2, 1]
            .map(|gpus| found(if gpus == 1 { "b" } else { "a" }, gpus, &Backend::NETWORKS));
        assert_eq!(
            select(&options, &own, &all, Rank(0)).unwrap_err().to_string(),
            "cannot select a backend: rank 1 (b) sees 1 GPU of the backend cuda for 2 ranks; start one rank per GPU, or set `OpenOptions::backend` to `Backend::Cuda` if ranks share GPUs, or to `Backend::Host` to use host memory"
        );
        // A machine without GPUs is no error beside one with GPUs.
        let all = ["a", "b"].map(|host| found(host, 1, &Backend::NETWORKS));
        let all = all.map(|found| {
            if found.host == "b" { RankDevices { cuda: absent(), ..found } } else { found }
        });
        let (choice, _) = select(&options, &own, &all, Rank(0)).unwrap();
        assert_eq!(choice.local, Backend::Cuda);
        let own = survey(absent());
        let (choice, _) = select(&options, &own, &all, Rank(1)).unwrap();
        assert_eq!(choice.local, Backend::Host);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn ranks_that_see_different_gpus_get_one_each() {
        let device = |seen: &[&[usize]]| {
            let see = |gpus: &&[usize]| RankDevices {
                cuda: Ok(names(gpus.iter().copied())),
                ..found("a", 0, &[])
            };
            let all: Vec<_> = seen.iter().map(see).collect();
            let chosen = |(rank, gpus): (Rank, &&[usize])| {
                let devices = (0..gpus.len()).map(|at| Device::new(Rank::at(at).0, ""));
                let own = survey(Ok(devices.collect()));
                let (choice, _) = select(&OpenOptions::default(), &own, &all, rank).ok()?;
                choice.device
            };
            Rank::all(seen.len()).zip(seen).map(chosen).collect::<Option<Vec<_>>>()
        };
        assert_eq!(device(&[&[0, 1], &[0, 1]]), Some(vec![0, 1]));
        assert_eq!(device(&[&[0], &[1], &[2]]), Some(vec![0, 0, 0]));
        assert_eq!(device(&[&[1, 0], &[1]]), Some(vec![1, 0]));
        assert_eq!(device(&[&[0, 1], &[2, 3]]), Some(vec![0, 0]));
        assert_eq!(device(&[&[0], &[0]]), None);
    }

    #[test]
    fn a_network_that_serves_all_ranks_alone_is_on_every_rank() {
        for network in Backend::NETWORKS {
            let without =
                |networks| RankDevices { requested: Some(network), ..found("nodea", 0, networks) };
            let all = [without(&[network]), without(&[])];
            let mates = [Rank(0), Rank(1)];
            let error = choose_on_machine(&all, &mates).unwrap_err();
            let text = format!(
                "cannot open the backend {network} on rank 1 (nodea): {network} is missing; install {network}"
            );
            assert_eq!((error.peer(), error.to_string()), (Some(Rank(1)), text));
            assert_eq!(choose_on_machine(&all, &mates[..1]).unwrap(), (network, Vec::new()));
        }
    }

    #[cfg(feature = "host")]
    #[test]
    fn nodes_of_one_machine_have_a_second_fabric() {
        in_process::run(4, |bootstrap| {
            let options = OpenOptions::default().backend(Backend::Host);
            let topology = Topology::of_nodes(&[0, 0, 1, 1])?;
            let mut group =
                options.group(GroupOptions::default().topology(topology)).open(bootstrap)?;
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
    fn ranks_that_start_far_apart_meet() {
        let (timeout, late) = (Duration::from_secs(3), Duration::from_millis(4500));
        let open = |options: &OpenOptions| {
            in_process::run(3, |bootstrap| {
                if bootstrap.rank() == Rank(1) {
                    std::thread::sleep(late);
                }
                options.clone().open(bootstrap)?.close()
            })
        };
        let options = |group| OpenOptions::default().backend(Backend::Host).group(group);
        let group = GroupOptions::default().timeout(timeout);
        open(&options(group.clone())).unwrap();
        let error = open(&options(group.start_timeout(timeout))).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
    }

    #[cfg(feature = "host")]
    #[test]
    fn one_rank_without_a_launcher_says_so() {
        let group = OpenOptions::default().backend(Backend::Host).from_env().unwrap();
        let text = "host (one rank: no launcher's variables are set)";
        assert_eq!(group.selection().to_string(), text);
        group.close().unwrap();
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

    #[test]
    fn a_backend_that_is_not_built_in_names_the_feature() {
        for backend in Backend::ALL.into_iter().filter(|backend| !backend.is_built_in()) {
            let error = in_process::run(1, |bootstrap| {
                OpenOptions::default().backend(backend).open(bootstrap).map(drop)
            });
            let feature = format!("enable the feature `{backend}`");
            assert!(error.unwrap_err().to_string().contains(&feature), "{backend}");
        }
    }
}
