//! Reads the environment variables in which the launcher tells a process its rank and the address
//! of the hub.
//!
//! | launcher | rank, ranks | on this host | hub |
//! | --- | --- | --- | --- |
//! | torchrun, Kubernetes operators, by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` | the same, to be set by hand |
//! | MVAPICH | `MV2_COMM_WORLD_RANK`, `_SIZE` | `MV2_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` | to be set by hand |
//! | MPICH, Intel MPI, Cray MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`, or `PMI_LOCAL_RANK`, `PMI_LOCAL_SIZE` | as the last row inside Slurm, otherwise to be set by hand |
//! | IBM's `jsrun` | `JSM_NAMESPACE_RANK`, `_SIZE` | `JSM_NAMESPACE_LOCAL_RANK`, `_LOCAL_SIZE` | to be set by hand |
//! | Flux | `FLUX_TASK_RANK`, `FLUX_JOB_SIZE` | `FLUX_TASK_LOCAL_ID` | to be set by hand |
//! | PMIx, for example PRRTE's `prun` | `PMIX_RANK`, no size | | |
//! | PALS, the `mpiexec` of PBS and Cray systems | `PALS_RANKID`, no size | `PALS_LOCAL_RANKID`, `PALS_LOCAL_SIZE` | |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID` | the first host of `SLURM_STEP_NODELIST` |
//!
//! The first row of which both the rank and the size are set is used: `mpirun` inside a Slurm job
//! is Open MPI. What it does not say about this host is taken from the rows below it that give the
//! same rank and size. If a row above it gives another rank or size, that is an error, because
//! several ranks would otherwise become several groups of one.
//!
//! A process without such a row is a group of one rank, unless a variable shows that it is one of
//! several. Then it gets an error that names the variable. These variables show that:
//!
//! - every variable of the columns "rank, ranks" and "on this host", `GROUP_RANK`, `MASTER_ADDR`,
//!   `MASTER_PORT` and `PEERLANE_HUB`;
//! - but not a number of ranks of 1, which some login scripts set as `WORLD_SIZE`;
//! - but not `PMIX_RANK=0`: Open MPI 4 sets it in a process without a launcher that initialises
//!   MPI. Other ranks get the error;
//! - but not `SLURM_PROCID=0` and `SLURM_LOCALID=0`, which a batch script has. If `SLURM_NTASKS` or
//!   `SLURM_NPROCS` says that the job has several tasks, a program that `srun` did not start gets
//!   an error. Without `SLURM_PROCID`, as in the shell of `salloc`, these two mean nothing.
//!
//! Variables that single processes have too show nothing: `JOB_COMPLETION_INDEX` of an indexed job
//! of Kubernetes, `SLURM_ARRAY_TASK_ID`, `NODE_RANK`, and settings that are useful in a profile,
//! such as `PEERLANE_PORT` and `PEERLANE_SECRET`. Processes whose variables were all removed cannot
//! be told from single processes. A program that knows how many ranks it must have sets that number
//! with `OpenOptions::ranks` of the crate `peerlane`.
//!
//! - `MASTER_ADDR` is optional if the launcher says that all ranks are on one host: the default is
//!   then 127.0.0.1. It is also optional in a Slurm job, in which rank 0 is on the first host.
//!   `MASTER_PORT` is always optional: the default is [`DEFAULT_PORT`].
//! - With `TORCHELASTIC_USE_AGENT_STORE=True` torchrun's own store listens at `MASTER_PORT`; the
//!   hub takes the port after it. A program that opens a store there itself sets `PEERLANE_PORT`.
//! - `PEERLANE_PORT` takes precedence over `MASTER_PORT`.
//! - `MASTER_ADDR` is a name, an IPv4 address, or an IPv6 address with or without brackets. A
//!   link-local address needs the interface of this host, as in `fe80::1%eth0`. `0.0.0.0` and `::`
//!   mean the host of each rank, so they work on one host only.
//! - `PEERLANE_HUB=host:port` names an [external hub](super::tcp::Hub): rank 0 opens none, and the
//!   address and ports above are ignored.
//! - `PEERLANE_SECRET`, or a file that only its owner can access and that `PEERLANE_SECRET_FILE`
//!   names, holds the [secret](super::Secret) of the job: 16 to 4096 bytes, the same on all ranks.
//!   Only processes that know it can join.
//! - Without a secret, the address of the hub must be a loopback address. If the launcher says that
//!   all ranks are on one host, it is 127.0.0.1 unless `MASTER_ADDR` is itself a loopback address.
//!   `PEERLANE_ALLOW_UNAUTHENTICATED=1` permits other addresses, at which any process can then
//!   join.
//! - `PEERLANE_JOB_ID` identifies the job, so that two jobs at one port are told apart. The default
//!   is `TORCHELASTIC_RUN_ID` unless it is `none`, `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid`,
//!   or `SLURM_JOB_ID.SLURM_STEP_ID`.
//!
//! An empty variable counts as not set.

use std::path::Path;

use peerlane_hal::{ErrorKind, Rank};

use super::address::Address;
use super::secret::Secret;
use crate::error::{Error, quoted, shown};

/// The port of the hub if no environment variable sets another port.
pub const DEFAULT_PORT: u16 = 29501;

/// Holds the settings of a process that joins its group, such as its rank and the address of the
/// hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The rank of this process.
    pub rank: Rank,
    /// The number of ranks of the group.
    pub ranks: usize,
    /// The environment variable that `ranks` was read from, or `None` if the caller has set
    /// `ranks`.
    pub ranks_variable: Option<&'static str>,
    /// The index of this rank among the ranks of its host, counted from 0, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// The number of ranks on this host, if the launcher sets it.
    pub local_ranks: Option<u32>,
    /// The id of the job, if the launcher or `PEERLANE_JOB_ID` sets it.
    ///
    /// It is equal on all ranks of a job, and different for other jobs.
    pub job: Option<String>,
    /// The secret of the job, the same on all ranks, or `None` for a job without a secret.
    pub secret: Option<Secret>,
    /// Whether a job without a secret may have its hub at an address that other hosts can reach.
    pub allow_unauthenticated: bool,
    /// The address of the hub, and which process opens the hub there.
    pub hub: HubAddress,
}

/// Holds the address of the hub as `host:port`, and tells which process opens the hub there.
///
/// The host is a name, an IPv4 address, or an IPv6 address in brackets, with its interface if it is
/// link-local: `[fe80::1%eth0]:29501`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubAddress {
    /// Rank 0 opens the hub at this address.
    RankZero(String),
    /// Another process has opened the hub at this address.
    External(String),
}

impl Environment {
    /// Creates the settings of a rank that joins the running hub at the address `hub`, without a
    /// launcher.
    pub fn at_hub(hub: impl ToString, rank: Rank, ranks: usize) -> Self {
        Self {
            rank,
            ranks,
            ranks_variable: None,
            local_rank: None,
            local_ranks: None,
            job: None,
            secret: None,
            allow_unauthenticated: false,
            hub: HubAddress::External(hub.to_string()),
        }
    }

    /// Reads the settings from the environment of this process, or returns `None` if no launcher
    /// has set them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) naming the variable that is missing,
    /// malformed, or inconsistent with another. It is also an error if a variable shows that the
    /// process is one of several, but its rank or their number is missing.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::from_lookup(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// Reads the settings like [`from_env`](Self::from_env), but takes the value of each variable
    /// from `lookup`.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        let variables = Variables(&lookup);

        // The first complete row wins, and the rows above it must not contradict it.
        let mut partial = Vec::new();
        for (row, launcher) in LAUNCHERS.iter().enumerate() {
            let complete = match variables.read(launcher)? {
                Reading::Nothing => continue,
                Reading::Partial(part) => {
                    partial.push(part);
                    continue;
                }
                Reading::Complete(complete) => complete,
            };

            for part in &partial {
                part.check_consistent(&complete)?;
            }

            let launchers = variables.launchers_of(&complete, &LAUNCHERS[row..]);
            return Ok(Some(variables.environment(&complete, &launchers)?));
        }

        // A batch script may set MASTER_ADDR for the programs that it starts with `srun`. Then the
        // error that names `srun` helps more than one that names MASTER_ADDR.
        if !partial.iter().any(PartialSet::has_number) {
            variables.check_batch_script()?;
        }

        partial.first().map_or(Ok(None), |part| Err(part.error()))
    }

    /// Checks that a hub that other hosts can reach has a secret, or is allowed to have none.
    pub(super) fn check_authentication(&self) -> Result<(), Error> {
        let (variable, address) = match &self.hub {
            HubAddress::RankZero(address) => ("MASTER_ADDR", address),
            HubAddress::External(address) => ("PEERLANE_HUB", address),
        };

        // A malformed address is an error even if there is a secret.
        let is_loopback = Address::parse(HUB_ADDRESS, address)?.is_loopback();
        if self.secret.is_some() || self.allow_unauthenticated || is_loopback {
            return Ok(());
        }

        Err(invalid(format!(
            "the hub's address {address} ({variable}) can be reached from other hosts, but there is no secret; \
             {NO_SECRET_HELP}"
        )))
    }
}

/// The advice at the end of errors about a hub that other hosts can reach without a secret.
pub(super) const NO_SECRET_HELP: &str = "set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks \
    (`openssl rand -hex 32` creates one), or set PEERLANE_ALLOW_UNAUTHENTICATED=1 if only this job can reach the network";

/// The words for the address of the hub in errors whose code does not know the variable of the
/// address.
pub(super) const HUB_ADDRESS: &str = "the address of the hub";

const JOB_BYTES_MAX: usize = 256;

/// Lists the names of the environment variables that one launcher sets.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The variable with the number of ranks, or `None` if the launcher sets no such variable.
    ranks: Option<&'static str>,
    local_rank: &'static [&'static str],
    local_ranks: &'static [&'static str],
    hosts: Option<&'static str>,
    /// The variable with the list of hosts, the first of which runs rank 0.
    host_list: Option<&'static str>,
    /// Other variables whose presence shows that the process is one of several ranks.
    signs: &'static [&'static str],
    /// Variables that even a single process can have, each with the value that it then has.
    alone: &'static [(&'static str, &'static str)],
    /// Alternative lists of variables, each of which identifies the job if all its variables are
    /// set.
    jobs: &'static [&'static [&'static str]],
}

/// The values of the fields that an entry of [`LAUNCHERS`] leaves out.
const NO_VARIABLES: Launcher = Launcher {
    name: "",
    rank: "",
    ranks: None,
    local_rank: &[],
    local_ranks: &[],
    hosts: None,
    host_list: None,
    signs: &[],
    alone: &[],
    jobs: &[],
};

static LAUNCHERS: [Launcher; 9] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        ranks: Some("WORLD_SIZE"),
        local_rank: &["LOCAL_RANK"],
        local_ranks: &["LOCAL_WORLD_SIZE"],
        signs: &["GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PEERLANE_HUB"],
        jobs: &[&["TORCHELASTIC_RUN_ID"]],
        ..NO_VARIABLES
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: Some("OMPI_COMM_WORLD_SIZE"),
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_ranks: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        jobs: &[&["PMIX_NAMESPACE"], &["OMPI_MCA_ess_base_jobid"]],
        ..NO_VARIABLES
    },
    Launcher {
        name: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        ranks: Some("MV2_COMM_WORLD_SIZE"),
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_ranks: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        ..NO_VARIABLES
    },
    // Flux and PALS set the variables of PMI too. PMI comes first, because a `mpiexec` inside one
    // task of them sets only these.
    Launcher {
        name: "PMI",
        rank: "PMI_RANK",
        ranks: Some("PMI_SIZE"),
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_ranks: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        // Inside a Slurm job, a step holds the proxies of the launcher.
        hosts: Some("SLURM_STEP_NUM_NODES"),
        host_list: Some("SLURM_STEP_NODELIST"),
        jobs: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"], &["FLUX_JOB_ID"]],
        ..NO_VARIABLES
    },
    Launcher {
        name: "jsrun",
        rank: "JSM_NAMESPACE_RANK",
        ranks: Some("JSM_NAMESPACE_SIZE"),
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_ranks: &["JSM_NAMESPACE_LOCAL_SIZE"],
        ..NO_VARIABLES
    },
    Launcher {
        name: "Flux",
        rank: "FLUX_TASK_RANK",
        ranks: Some("FLUX_JOB_SIZE"),
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        hosts: Some("FLUX_JOB_NNODES"),
        jobs: &[&["FLUX_JOB_ID"]],
        ..NO_VARIABLES
    },
    Launcher { name: "PMIx", rank: "PMIX_RANK", alone: &[("PMIX_RANK", "0")], ..NO_VARIABLES },
    Launcher {
        name: "PALS",
        rank: "PALS_RANKID",
        local_rank: &["PALS_LOCAL_RANKID"],
        local_ranks: &["PALS_LOCAL_SIZE"],
        ..NO_VARIABLES
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        ranks: Some("SLURM_STEP_NUM_TASKS"),
        local_rank: &["SLURM_LOCALID"],
        hosts: Some("SLURM_STEP_NUM_NODES"),
        host_list: Some("SLURM_STEP_NODELIST"),
        alone: &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")],
        jobs: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
        ..NO_VARIABLES
    },
];

/// The variables with the number of tasks of a Slurm job, which are set even outside of `srun`.
const SLURM_JOB_TASKS: [&str; 2] = ["SLURM_NTASKS", "SLURM_NPROCS"];

/// Stores what the variables of one launcher say about the rank of this process.
enum Reading {
    Nothing,
    Partial(PartialSet),
    Complete(CompleteSet),
}

/// Holds the rank of this process and the number of ranks, as one launcher sets them.
struct CompleteSet {
    rank_name: &'static str,
    rank: u32,
    ranks_name: &'static str,
    ranks: u32,
}

/// Holds a variable that shows that this process is one of several, if rank or size is not set.
struct PartialSet {
    launcher: &'static Launcher,
    name: &'static str,
    value: String,
    rank: Option<u32>,
    ranks: Option<u32>,
}

impl PartialSet {
    fn has_number(&self) -> bool {
        self.rank.is_some() || self.ranks.is_some()
    }

    /// Returns the error for a process whose rank or number of ranks is not set.
    fn error(&self) -> Error {
        let Launcher { name: launcher, rank, ranks, .. } = self.launcher;
        let missing = match (self.rank, ranks) {
            (None, Some(ranks)) if self.ranks.is_none() => format!("{rank} and {ranks} are not"),
            (None, Some(_)) => format!("{rank} is not"),
            (Some(_), Some(ranks)) => format!("{ranks} is not"),
            (_, None) => format!("{launcher} sets no variable with the number of ranks"),
        };

        let Self { name, value, .. } = self;
        invalid(format!(
            "{name}={} is set, but {missing}; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one \
             rank), or unset {name}",
            shown(value)
        ))
    }

    /// Checks that this incomplete set does not contradict the rank and number of ranks in
    /// `complete`.
    fn check_consistent(&self, complete: &CompleteSet) -> Result<(), Error> {
        let Self { launcher, name, value, .. } = self;
        // A host has no more ranks than the group, so a local rank that is not below their number
        // is from another launch.
        let is_beyond = launcher.local_rank.contains(name)
            && value.parse::<u32>().is_ok_and(|local_rank| local_rank >= complete.ranks);

        // A number of 1 without a rank may come from a profile.
        let own_ranks = self.ranks.filter(|&ranks| ranks > 1);
        let is_other = |own: Option<u32>, other: u32| own.is_some_and(|own| own != other);
        let differs = is_other(self.rank, complete.rank) || is_other(own_ranks, complete.ranks);
        if !differs && !is_beyond {
            return Ok(());
        }

        let &CompleteSet { rank_name, rank, ranks_name, ranks } = complete;
        Err(invalid(format!(
            "{name}={} does not fit {rank_name}={rank} and {ranks_name}={ranks}; set RANK and WORLD_SIZE on every rank \
             (RANK=0 and WORLD_SIZE=1 run one rank), or unset {name}",
            shown(value)
        )))
    }
}

/// Reads environment variables through a lookup function.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// Reads the variables of `launcher`, and returns what they say about the rank of this process.
    fn read(&self, launcher: &'static Launcher) -> Result<Reading, Error> {
        let rank_name = launcher.rank;
        let rank = self.read_number(rank_name)?;
        let named_ranks = match launcher.ranks {
            Some(name) => self.read_number(name)?.map(|ranks| (name, ranks)),
            None => None,
        };

        if let (Some(rank), Some((ranks_name, ranks))) = (rank, named_ranks) {
            if ranks == 0 {
                return Err(invalid(format!(
                    "{ranks_name} is 0, expected at least 1, the number of ranks"
                )));
            }

            check_below(rank_name, rank, ranks_name, ranks)?;
            return Ok(Reading::Complete(CompleteSet { rank_name, rank, ranks_name, ranks }));
        }

        let ranks = named_ranks.map(|(_, ranks)| ranks);
        Ok(match self.sign(launcher) {
            Some((name, value)) => {
                Reading::Partial(PartialSet { launcher, name, value, rank, ranks })
            }
            None => Reading::Nothing,
        })
    }

    /// Returns the name and value of the first variable of `launcher` that a single process does
    /// not have.
    fn sign(&self, launcher: &Launcher) -> Option<(&'static str, String)> {
        let Launcher { rank, ranks, local_rank, local_ranks, signs, alone, .. } = launcher;
        let numbers = [*rank].into_iter().chain(*ranks);
        let others = [local_rank, local_ranks, signs].into_iter().copied().flatten().copied();

        for name in numbers.chain(others) {
            let Some(value) = self.text(name) else { continue };
            // Some login scripts set a number of ranks of 1.
            let is_one_rank = *ranks == Some(name) && value == "1";
            if !is_one_rank && !alone.contains(&(name, value.as_str())) {
                return Some((name, value));
            }
        }
        None
    }

    /// Returns the launchers in `rows` whose environment variables give the same rank and number of
    /// ranks as `complete` has.
    fn launchers_of(
        &self,
        complete: &CompleteSet,
        rows: &'static [Launcher],
    ) -> Vec<&'static Launcher> {
        let is =
            |name, wanted| matches!(self.read_number(name), Ok(Some(found)) if found == wanted);

        rows.iter()
            .filter(|launcher| is(launcher.rank, complete.rank))
            .filter(|launcher| launcher.ranks.is_some_and(|name| is(name, complete.ranks)))
            .collect()
    }

    /// Returns an error if this process is in a Slurm job of several tasks but was not started by
    /// `srun`.
    ///
    /// Such a process is a batch script, for example.
    fn check_batch_script(&self) -> Result<(), Error> {
        // In the shell of `salloc`, in which no program is a rank, this variable is not set.
        if self.text("SLURM_PROCID").is_none() {
            return Ok(());
        }

        for name in SLURM_JOB_TASKS {
            if let Some(ranks @ 2..) = self.read_number(name)? {
                return Err(invalid(format!(
                    "{name} is {ranks}, but `srun` did not start this process, because SLURM_STEP_NUM_TASKS is not set; start \
                     the program with `srun`, or set RANK=0 and WORLD_SIZE=1 to run one rank"
                )));
            }
        }
        Ok(())
    }

    /// Reads all settings of a process whose rank and number of ranks are in `complete`.
    ///
    /// `launchers` are the launchers that set these two.
    fn environment(
        &self,
        complete: &CompleteSet,
        launchers: &[&'static Launcher],
    ) -> Result<Environment, Error> {
        let names = |field: fn(&Launcher) -> &'static [&'static str]| {
            launchers.iter().flat_map(move |launcher| field(launcher)).copied()
        };
        let named_rank = self.first_number(names(|launcher| launcher.local_rank))?;
        let named_ranks = self.first_number(names(|launcher| launcher.local_ranks))?;
        if let (Some((name, number)), Some((bound_name, bound))) = (named_rank, named_ranks) {
            check_below(name, number, bound_name, bound)?;
        }

        let &CompleteSet { rank, ranks, ranks_name, .. } = complete;
        let local_ranks = named_ranks.map(|(_, number)| number);
        let hosts = self.first_number(launchers.iter().filter_map(|launcher| launcher.hosts))?;
        let one_host =
            ranks == 1 || local_ranks == Some(ranks) || hosts.is_some_and(|(_, hosts)| hosts == 1);

        let secret = self.secret()?;
        let allow_unauthenticated = self.allow_unauthenticated()?;
        let is_open = secret.is_some() || allow_unauthenticated;

        Ok(Environment {
            rank: Rank(rank),
            ranks: ranks as usize,
            ranks_variable: Some(ranks_name),
            local_rank: named_rank.map(|(_, number)| number),
            local_ranks,
            // The other launchers are left out, because they may agree on some ranks of the job
            // only.
            job: self.job(launchers[0])?,
            secret,
            allow_unauthenticated,
            hub: self.hub(launchers, one_host, is_open)?,
        })
    }

    fn secret(&self) -> Result<Option<Secret>, Error> {
        match (self.text("PEERLANE_SECRET"), self.text("PEERLANE_SECRET_FILE")) {
            (None, None) => Ok(None),
            (Some(text), None) => Secret::from_source("PEERLANE_SECRET", &text).map(Some),
            (None, Some(path)) => {
                let source = format!("the secret in the file {path} (PEERLANE_SECRET_FILE)");
                Secret::read_source(&source, Path::new(&path)).map(Some)
            }
            (Some(_), Some(_)) => Err(invalid(
                "both PEERLANE_SECRET and PEERLANE_SECRET_FILE are set, expected at most one of them",
            )),
        }
    }

    fn allow_unauthenticated(&self) -> Result<bool, Error> {
        match self.text("PEERLANE_ALLOW_UNAUTHENTICATED").as_deref() {
            None | Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(text) => Err(invalid(format!(
                "PEERLANE_ALLOW_UNAUTHENTICATED is {}, expected 1 or 0",
                quoted(text)
            ))),
        }
    }

    /// Returns the id of the job from `PEERLANE_JOB_ID` or from the variables of `launcher`.
    fn job(&self, launcher: &Launcher) -> Result<Option<String>, Error> {
        if let Some(job) = self.text("PEERLANE_JOB_ID") {
            if job.len() > JOB_BYTES_MAX {
                let bytes = job.len();
                let text =
                    format!("PEERLANE_JOB_ID has {bytes} bytes, expected at most {JOB_BYTES_MAX}");
                return Err(invalid(text));
            }
            return Ok(Some(job));
        }

        // A list counts only if all of its variables are set.
        let job = launcher.jobs.iter().find_map(|names| {
            let values: Option<Vec<String>> = names.iter().map(|name| self.text(name)).collect();
            Some(values?.join("."))
        });
        // torchrun sets `none` for every job without an id of its own. An id of the launcher that
        // is too long is no fault of the user, so it is left out.
        Ok(job.filter(|job| job != "none" && job.len() <= JOB_BYTES_MAX))
    }

    /// Returns the address of the hub, and whether rank 0 or another process opens the hub there.
    ///
    /// The address is a loopback address if other hosts may not and need not reach the hub:
    /// torchrun sets `MASTER_ADDR` to the name of the host even if all ranks are on that host.
    fn hub(
        &self,
        launchers: &[&Launcher],
        one_host: bool,
        is_open: bool,
    ) -> Result<HubAddress, Error> {
        if let Some(address) = self.text("PEERLANE_HUB") {
            let parsed = Address::parse("PEERLANE_HUB", &address)?;
            // No external hub listens at port 0.
            if parsed.port() == 0 {
                return Err(invalid(format!(
                    "PEERLANE_HUB is {address:?}, expected a port from 1 to {} after the host",
                    u16::MAX
                )));
            }

            return Ok(HubAddress::External(parsed.to_string()));
        }

        let port = self.hub_port()?;
        let address = match self.text("MASTER_ADDR") {
            Some(host) => Some(Address::parse_host("MASTER_ADDR", &host, port)?),
            None if one_host => None,
            None => self.first_host(launchers, port)?,
        };

        match address {
            Some(address) if is_open || !one_host || address.is_loopback() => {
                Ok(HubAddress::RankZero(address.to_string()))
            }
            _ if one_host => Ok(HubAddress::RankZero(format!("127.0.0.1:{port}"))),
            _ => Err(invalid(
                "MASTER_ADDR is not set; set it on every rank to the name or address of the host \
                 of rank 0",
            )),
        }
    }

    /// Returns `port` on the first host of a launcher's list of hosts, which is the host of rank 0.
    fn first_host(&self, launchers: &[&Launcher], port: u16) -> Result<Option<Address>, Error> {
        for name in launchers.iter().filter_map(|launcher| launcher.host_list) {
            if let Some(list) = self.text(name) {
                return Address::parse_host(name, &first_host(&list), port).map(Some);
            }
        }

        Ok(None)
    }

    /// Returns the port at which rank 0 opens the hub.
    fn hub_port(&self) -> Result<u16, Error> {
        if let Some(port) = self.port("PEERLANE_PORT")? {
            return Ok(port);
        }

        let Some(port) = self.port("MASTER_PORT")? else { return Ok(DEFAULT_PORT) };
        // With this variable, a store of torchrun itself listens at `MASTER_PORT`, so the hub takes
        // the port after it.
        if self.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() != Some("True") {
            return Ok(port);
        }

        port.checked_add(1).ok_or_else(|| {
            invalid(format!(
                "MASTER_PORT is {port}, which torchrun uses itself, and no port follows it; set \
                 PEERLANE_PORT to a free port, the same on every rank"
            ))
        })
    }

    fn port(&self, name: &str) -> Result<Option<u16>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };

        // The other ranks could not know a port that the system chooses for port 0.
        match text.parse() {
            Ok(port @ 1..) => Ok(Some(port)),
            _ => Err(invalid(format!(
                "{name} is {}, expected a port from 1 to {}",
                quoted(&text),
                u16::MAX
            ))),
        }
    }

    /// Parses the value of the variable `name` as a number, or returns `None` if it is not set.
    fn read_number(&self, name: &str) -> Result<Option<u32>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };

        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(invalid(format!(
                "{name} is {}, expected a number from 0 to {}",
                quoted(&text),
                u32::MAX
            ))),
        }
    }

    /// Returns the first variable of `names` that is set, and its value as a number.
    fn first_number(
        &self,
        names: impl IntoIterator<Item = &'static str>,
    ) -> Result<Option<(&'static str, u32)>, Error> {
        for name in names {
            if let Some(number) = self.read_number(name)? {
                return Ok(Some((name, number)));
            }
        }

        Ok(None)
    }

    /// Returns the trimmed value of the variable `name`, or `None` if it is empty or not set.
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }
}

/// Returns the first host of a list in Slurm's notation, such as `node03` of `node[03-05,7],login`.
fn first_host(list: &str) -> String {
    let mut host = String::new();
    let mut rest = list;
    while let Some(end) = rest.find(['[', ',']) {
        host.push_str(&rest[..end]);
        if rest[end..].starts_with(',') {
            return host;
        }

        // Without a closing bracket, the range extends to the end of the text.
        let (numbers, after) = rest[end + 1..].split_once(']').unwrap_or((&rest[end + 1..], ""));
        host.extend(numbers.split(['-', ',']).next());
        rest = after;
    }

    host + rest
}

/// Checks that `number`, the value of the variable `name`, is below `bound`, the value of
/// `bound_name`.
fn check_below(name: &str, number: u32, bound_name: &str, bound: u32) -> Result<(), Error> {
    if number < bound {
        return Ok(());
    }

    Err(invalid(format!(
        "{name} is {number}, expected a number below {bound}, the value of {bound_name} (ranks \
         count from 0)"
    )))
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
