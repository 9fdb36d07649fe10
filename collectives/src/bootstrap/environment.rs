//! Reads the environment variables in which the launcher tells a process its rank and the address of the hub.
//!
//! | launcher | rank, ranks | on this host | hub |
//! | --- | --- | --- | --- |
//! | torchrun, Kubernetes operators, by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` | the same, to be set by hand |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | as the next row inside Slurm, otherwise to be set by hand |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID` | the first host of `SLURM_STEP_NODELIST` |
//!
//! The first row of which the rank or the size is set is used: `mpirun` inside a Slurm job is Open MPI. A program in the shell
//! of `salloc` runs as if there were no launcher. In a batch script of several tasks, a program that `srun` did not start gets an
//! error.
//!
//! - `MASTER_ADDR` is optional if the launcher says that all ranks are on one host: the default is then 127.0.0.1. It is also
//!   optional in a Slurm job, in which rank 0 is on the first host. `MASTER_PORT` is always optional: the default is
//!   [`DEFAULT_PORT`].
//! - With `TORCHELASTIC_USE_AGENT_STORE=True` torchrun's own store listens at `MASTER_PORT`; the hub
//!   takes the port after it. A program that opens a store there itself sets `PEERLANE_PORT`.
//! - `PEERLANE_PORT` takes precedence over `MASTER_PORT`.
//! - `PEERLANE_HUB=host:port` names an [external hub](super::tcp::Hub): rank 0 opens none, and the
//!   address and ports above are ignored.
//! - `PEERLANE_SECRET`, or a file that only its owner can access and that `PEERLANE_SECRET_FILE` names, holds
//!   the [secret](super::Secret) of the job: 16 to 4096 bytes, the same on all ranks. Only processes that know
//!   it can join.
//! - Without a secret, the address of the hub must be a loopback address. If the launcher says that all ranks
//!   are on one host, it is 127.0.0.1, whatever `MASTER_ADDR` is. `PEERLANE_ALLOW_UNAUTHENTICATED=1` permits
//!   other addresses, at which any process can then join.
//! - `PEERLANE_JOB_ID` identifies the job, so that two jobs at one port are told apart. The default is
//!   `TORCHELASTIC_RUN_ID` unless it is `none`, `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid`, or
//!   `SLURM_JOB_ID.SLURM_STEP_ID`.
//!
//! An empty variable counts as not set.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use peerlane_hal::{ErrorKind, Rank};

use super::secret::Secret;
use crate::error::Error;

/// The port of the hub if no variable names one.
pub const DEFAULT_PORT: u16 = 29501;

/// The settings with which a process joins its group, such as its rank and the address of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The rank of this process.
    pub rank: Rank,
    /// The number of ranks of the group.
    pub ranks: usize,
    /// The index of this rank among the ranks of its host, counted from 0, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// The number of ranks on this host, if the launcher sets it.
    pub local_ranks: Option<u32>,
    /// The id of the job, if the launcher or `PEERLANE_JOB_ID` sets one. It is equal on all ranks of a job, and
    /// different for other jobs.
    pub job: Option<String>,
    /// The secret of the job, equal on all ranks.
    pub secret: Option<Secret>,
    /// Whether the hub may be at an address that other hosts can reach although the job has no secret.
    pub allow_unauthenticated: bool,
    /// The address of the hub, and which process opens the hub there.
    pub hub: HubAddress,
}

/// The address, as `host:port`, of the hub that all ranks connect to, and which process opens the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubAddress {
    /// Rank 0 opens the hub at this address.
    RankZero(String),
    /// Another process has opened the hub at this address.
    External(String),
}

impl Environment {
    /// Creates the settings of a rank whose group uses the running hub `hub`, without a launcher.
    pub fn at_hub(hub: impl ToString, rank: Rank, ranks: usize) -> Self {
        let hub = HubAddress::External(hub.to_string());
        Self {
            rank,
            ranks,
            local_rank: None,
            local_ranks: None,
            job: None,
            secret: None,
            allow_unauthenticated: false,
            hub,
        }
    }

    /// Reads the environment variables of this process; returns `None` if no launcher has set them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) naming the variable that is missing, malformed, or
    /// inconsistent with another.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::from_lookup(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// Reads the environment variables of [`from_env`](Self::from_env) through a lookup function instead
    /// of from the process.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Error> {
        let variables = Variables(&lookup);
        for launcher in &LAUNCHERS {
            if let Some((rank, ranks)) = variables.rank_and_size(launcher)? {
                return Ok(Some(variables.environment(launcher, rank, ranks)?));
            }
        }
        Ok(None)
    }

    pub(super) fn check_authentication(&self) -> Result<(), Error> {
        let (variable, address) = match &self.hub {
            HubAddress::RankZero(address) => ("MASTER_ADDR", address),
            HubAddress::External(address) => ("PEERLANE_HUB", address),
        };
        if self.secret.is_some() || self.allow_unauthenticated || is_loopback(address) {
            return Ok(());
        }
        Err(invalid(format!(
            "the hub's address {address} ({variable}) can be reached from other hosts, but there is no secret; \
             {NO_SECRET_HELP}"
        )))
    }
}

pub(super) const NO_SECRET_HELP: &str = "set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks \
    (`openssl rand -hex 32` creates one), or set PEERLANE_ALLOW_UNAUTHENTICATED=1 if only this job can reach the network";

/// Only the literal loopback addresses and `localhost` count as addresses of this host. A host may resolve its own name
/// to a loopback address, but other hosts do not, so no other name counts.
pub(super) fn is_loopback(address: &str) -> bool {
    let name = address.rsplit_once(':').map_or(address, |(name, _)| name);
    let literal = name.trim_matches(['[', ']']).parse::<IpAddr>();
    literal.is_ok_and(|ip| ip.to_canonical().is_loopback())
        || name.eq_ignore_ascii_case("localhost")
}

const JOB_BYTES_MAX: usize = 256;

struct Launcher {
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    local_ranks: Option<&'static str>,
    hosts: Option<&'static str>,
    /// The variable with the list of hosts; rank 0 is on the first.
    host_list: Option<&'static str>,
    /// The variable with the number of ranks of the job, which is also set in processes that the launcher has not started.
    job_ranks: Option<&'static str>,
    /// Each version of a launcher has its own list of variables, which together identify the job.
    jobs: &'static [&'static [&'static str]],
}

const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        rank: "RANK",
        ranks: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_ranks: Some("LOCAL_WORLD_SIZE"),
        hosts: None,
        host_list: None,
        job_ranks: None,
        jobs: &[&["TORCHELASTIC_RUN_ID"]],
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_ranks: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        hosts: None,
        host_list: None,
        job_ranks: None,
        jobs: &[&["PMIX_NAMESPACE"], &["OMPI_MCA_ess_base_jobid"]],
    },
    Launcher {
        rank: "PMI_RANK",
        ranks: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_ranks: Some("MPI_LOCALNRANKS"),
        // Inside a Slurm job, a step holds the proxies of the launcher.
        hosts: Some("SLURM_STEP_NUM_NODES"),
        host_list: Some("SLURM_STEP_NODELIST"),
        job_ranks: None,
        jobs: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
    },
    Launcher {
        rank: "SLURM_PROCID",
        ranks: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_ranks: None,
        hosts: Some("SLURM_STEP_NUM_NODES"),
        host_list: Some("SLURM_STEP_NODELIST"),
        job_ranks: Some("SLURM_NTASKS"),
        jobs: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
    },
];

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn rank_and_size(&self, launcher: &Launcher) -> Result<Option<(u32, u32)>, Error> {
        let Launcher { rank: rank_name, ranks: ranks_name, job_ranks, .. } = launcher;
        let (rank, ranks) = match (self.number(rank_name)?, self.number(ranks_name)?) {
            (None, None) => return Ok(None),
            (Some(_), None) if job_ranks.is_some() => return self.without_srun(launcher),
            (Some(rank), Some(ranks)) => (rank, ranks),
            (Some(rank), None) => {
                return Err(invalid(format!(
                    "{rank_name}={rank} is set, but {ranks_name} is not; set both variables or \
                     neither"
                )));
            }
            (None, Some(ranks)) => {
                return Err(invalid(format!(
                    "{ranks_name}={ranks} is set, but {rank_name} is not; set both variables or \
                     neither"
                )));
            }
        };
        if ranks == 0 {
            return Err(invalid(format!(
                "{ranks_name} is 0, expected at least 1, the number of ranks"
            )));
        }
        check_below(rank_name, rank, ranks_name, ranks)?;
        Ok(Some((rank, ranks)))
    }

    /// Checks a process in a job of the launcher that the launcher has not started as a rank, such as a batch script.
    fn without_srun(&self, launcher: &Launcher) -> Result<Option<(u32, u32)>, Error> {
        let name = launcher.job_ranks.unwrap_or_default();
        match self.number(name)? {
            Some(ranks @ 2..) => Err(invalid(format!(
                "{name} is {ranks}, but `srun` did not start this process, because {} is not set; start the program with \
                 `srun`, or set RANK=0 and WORLD_SIZE=1 to run one rank",
                launcher.ranks
            ))),
            _ => Ok(None),
        }
    }

    fn environment(
        &self,
        launcher: &Launcher,
        rank: u32,
        ranks: u32,
    ) -> Result<Environment, Error> {
        let local_rank = self.number(launcher.local_rank)?;
        let local_ranks = match launcher.local_ranks {
            Some(name) => self.number(name)?.map(|ranks| (name, ranks)),
            None => None,
        };
        if let (Some(rank), Some((name, ranks))) = (local_rank, local_ranks) {
            check_below(launcher.local_rank, rank, name, ranks)?;
        }
        let hosts = launcher.hosts.map(|name| self.number(name)).transpose()?.flatten();
        let local_ranks = local_ranks.map(|(_, ranks)| ranks);
        let one_host = ranks == 1 || local_ranks == Some(ranks) || hosts == Some(1);
        let (secret, allow_unauthenticated) = (self.secret()?, self.allow_unauthenticated()?);
        let is_open = secret.is_some() || allow_unauthenticated;
        Ok(Environment {
            rank: Rank(rank),
            ranks: ranks as usize,
            local_rank,
            local_ranks,
            job: self.job(launcher)?,
            secret,
            allow_unauthenticated,
            hub: self.hub(launcher, one_host, is_open)?,
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
            Some(text) => {
                Err(invalid(format!("PEERLANE_ALLOW_UNAUTHENTICATED is {text:?}, expected 1 or 0")))
            }
        }
    }

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
        let read = |names: &&[&str]| {
            let values: Option<Vec<String>> = names.iter().map(|name| self.text(name)).collect();
            values.map(|values| values.join("."))
        };
        let job = launcher.jobs.iter().find_map(read);
        // torchrun sets this for every job without an id of its own.
        Ok(job.filter(|job| job != "none" && job.len() <= JOB_BYTES_MAX))
    }

    /// The hub is on the loopback interface if other hosts may not and need not reach it.
    ///
    /// torchrun sets `MASTER_ADDR` to the host's name also if all ranks are on that host.
    fn hub(&self, launcher: &Launcher, one_host: bool, is_open: bool) -> Result<HubAddress, Error> {
        if let Some(address) = self.text("PEERLANE_HUB") {
            let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            return match port.map(|(_, port)| port.parse::<u16>()) {
                Some(Ok(1..)) => Ok(HubAddress::External(address)),
                _ => Err(invalid(format!(
                    "PEERLANE_HUB is {address:?}, expected a host and a port, such as \
                     10.0.0.1:29501"
                ))),
            };
        }
        let port = self.hub_port()?;
        let first_host = || Some(first_host(&self.text(launcher.host_list?)?));
        let host = self.text("MASTER_ADDR").or_else(|| first_host().filter(|_| !one_host));
        let address = host.map(|host| match host.parse::<Ipv6Addr>() {
            Ok(host) => format!("[{host}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        });
        match address {
            Some(address) if is_open || !one_host || is_loopback(&address) => {
                Ok(HubAddress::RankZero(address))
            }
            _ if one_host => Ok(HubAddress::RankZero(format!("127.0.0.1:{port}"))),
            _ => Err(invalid(
                "MASTER_ADDR is not set; set it on every rank to the name or address of the host \
                 of rank 0",
            )),
        }
    }

    fn hub_port(&self) -> Result<u16, Error> {
        if let Some(port) = self.port("PEERLANE_PORT")? {
            return Ok(port);
        }
        let Some(port) = self.port("MASTER_PORT")? else { return Ok(DEFAULT_PORT) };
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
        match text.parse() {
            Ok(port @ 1..) => Ok(Some(port)),
            _ => {
                Err(invalid(format!("{name} is {text:?}, expected a port from 1 to {}", u16::MAX)))
            }
        }
    }

    fn number(&self, name: &str) -> Result<Option<u32>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(invalid(format!(
                "{name} is {text:?}, expected a number from 0 to {}",
                u32::MAX
            ))),
        }
    }

    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }
}

/// Returns the first host of a list such as `node[03-05,7],login`, which is `node03`.
fn first_host(list: &str) -> String {
    let (mut host, mut rest) = (String::new(), list);
    while let Some(end) = rest.find(['[', ',']) {
        host.push_str(&rest[..end]);
        if rest[end..].starts_with(',') {
            return host;
        }
        let (numbers, after) = rest[end + 1..].split_once(']').unwrap_or((&rest[end + 1..], ""));
        host.extend(numbers.split(['-', ',']).next());
        rest = after;
    }
    host + rest
}

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
