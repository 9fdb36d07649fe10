//! Which backend moves the bytes, and on which GPUs.

use std::str::FromStr;

use clap::ValueEnum;
use peerlane::{cuda, rocm};

use super::engine::Engine;
use super::options::Options;
use crate::error::{Failure, Result};

/// What moves the bytes, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Auto,
    Host,
    Cuda,
    Rocm,
    Rdma,
}

/// GPUs by the driver's numbers, such as `0,1,3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Devices(Vec<u32>);

impl Backend {
    /// As the command line takes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Rdma => "rdma",
        }
    }
}

/// The ranks, as far as they are known before they meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Crew {
    /// How many run on this machine.
    pub(crate) local_ranks: Option<usize>,
    /// Others run on other machines.
    pub(crate) spread: bool,
}

/// A GPU that a rank may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// The driver's number.
    pub(crate) ordinal: u32,
    /// Its place on the bus, such as `0000:1b:00.0`.
    pub(crate) pci_bus_id: String,
}

/// What moves the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The backend; not `Auto`.
    pub(crate) backend: Backend,
    /// The GPUs that the ranks of this machine take in turn; none on the host.
    pub(crate) seats: Vec<Seat>,
    /// What `auto` took, and why.
    pub(crate) note: Option<String>,
}

/// GPUs from which on `auto` takes them.
const GPUS_WORTHWHILE: usize = 2;

impl Chosen {
    /// Chooses for these ranks.
    ///
    /// # Errors
    /// If this machine or this build cannot run what is asked for, in the backend's own words.
    pub(crate) fn of(options: &Options, crew: Crew) -> Result<Self> {
        let chosen = match options.backend {
            Backend::Auto => Self::auto(seats(Backend::Cuda, options.devices.as_ref()), crew),
            Backend::Host => Self::host(None),
            Backend::Cuda => {
                let seats = seats(Backend::Cuda, options.devices.as_ref())?;
                Self { backend: Backend::Cuda, seats, note: None }
            }
            Backend::Rocm => {
                options.check_without_cuda()?;
                let seats = seats(Backend::Rocm, options.devices.as_ref())?;
                Engine::check(options)?;
                Self { backend: Backend::Rocm, seats, note: None }
            }
            Backend::Rdma => {
                options.cards.check()?;
                Self { backend: Backend::Rdma, seats: Vec::new(), note: None }
            }
        };
        if chosen.backend != Backend::Rocm {
            Engine::check_without_rocm(options, chosen.name())?;
        }
        if chosen.seats.is_empty() {
            options.check_without_gpus(chosen.name())?;
        }
        Ok(chosen)
    }

    /// The backend's name.
    pub(crate) fn name(&self) -> &'static str {
        self.backend.name()
    }

    fn auto(seats: Result<Vec<Seat>>, Crew { local_ranks, spread }: Crew) -> Self {
        let seats = match seats {
            Ok(seats) => seats,
            Err(error) => return Self::host(Some(error.text().to_owned())),
        };
        let gpus = match seats.len() {
            1 => "1 GPU".to_owned(),
            count => format!("{count} GPUs"),
        };
        // One GPU has no peer, unless that is on another machine.
        if seats.len() < GPUS_WORTHWHILE && !spread {
            return Self::host(Some(format!("{gpus}, wanted {GPUS_WORTHWHILE} or more")));
        }
        if let Some(ranks) = local_ranks.filter(|ranks| *ranks > seats.len()) {
            return Self::host(Some(format!(
                "{gpus} for {ranks} ranks; --backend cuda shares them"
            )));
        }
        let note = Some(format!("auto took cuda: {gpus}"));
        Self { backend: Backend::Cuda, seats, note }
    }

    fn host(why_not_cuda: Option<String>) -> Self {
        let note = why_not_cuda.map(|why| format!("auto took host; cuda: {why}"));
        Self { backend: Backend::Host, seats: Vec::new(), note }
    }

    /// Ranks to spawn unless told otherwise.
    pub(crate) fn ranks_default(&self) -> usize {
        if self.seats.is_empty() { Options::RANKS_DEFAULT } else { self.seats.len() }
    }

    /// The GPU of the rank with this number on this machine; `None` on the host.
    pub(crate) fn seat(&self, local_rank: usize) -> Option<&Seat> {
        self.seats.get(local_rank.checked_rem(self.seats.len())?)
    }
}

/// The GPUs of a backend that are asked for, or all.
fn seats(backend: Backend, wanted: Option<&Devices>) -> Result<Vec<Seat>> {
    let missing = |text: String| {
        Failure::failed(text).with_advice("`peerlane doctor` shows what this machine has")
    };
    let seats: Vec<Seat> = if backend == Backend::Rocm {
        let devices = rocm::discover().map_err(|error| missing(error.to_string()))?;
        let seat = |device: &rocm::Device| Seat {
            ordinal: device.ordinal,
            pci_bus_id: device.pci.to_string(),
        };
        devices.iter().map(seat).collect()
    } else {
        let devices = cuda::discover().map_err(|error| missing(error.to_string()))?;
        let seat = |device: &cuda::Device| Seat {
            ordinal: device.ordinal,
            pci_bus_id: device.pci_bus_id.clone(),
        };
        devices.iter().map(seat).collect()
    };
    pick(backend, seats, wanted)
}

fn pick(backend: Backend, seats: Vec<Seat>, wanted: Option<&Devices>) -> Result<Vec<Seat>> {
    let Some(Devices(wanted)) = wanted else {
        if seats.is_empty() {
            return Err(Failure::failed(format!("the backend {} finds no device", backend.name()))
                .with_advice("`peerlane doctor` shows what this machine has"));
        }
        return Ok(seats);
    };
    let find = |ordinal: &u32| {
        seats.iter().find(|seat| seat.ordinal == *ordinal).cloned().ok_or_else(|| {
            let count = seats.len();
            Failure::usage(format!("--devices names GPU {ordinal}, this process sees {count}"))
                .with_advice(match backend {
                    Backend::Rocm => "they are numbered from 0; HIP_VISIBLE_DEVICES may hide some",
                    _ => "they are numbered from 0; CUDA_VISIBLE_DEVICES may hide some",
                })
        })
    };
    wanted.iter().map(find).collect()
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = |word: &str| {
            word.trim().parse().map_err(|_| "wanted the numbers of GPUs, such as 0,1,3".to_owned())
        };
        text.split(',').map(ordinal).collect::<std::result::Result<_, _>>().map(Self)
    }
}

impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<_> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(count: u32) -> Vec<Seat> {
        let seat = |ordinal| Seat { ordinal, pci_bus_id: format!("0000:{ordinal:02x}:00.0") };
        (0..count).map(seat).collect()
    }

    #[test]
    fn auto_takes_gpus_from_two_on_and_says_why_not() {
        let note = |seats, local_ranks| {
            Chosen::auto(seats, Crew { local_ranks, spread: false }).note.unwrap()
        };
        insta::assert_snapshot!(note(Ok(some(2)), Some(2)), @"auto took cuda: 2 GPUs");
        insta::assert_snapshot!(note(Ok(some(4)), None), @"auto took cuda: 4 GPUs");
        insta::assert_snapshot!(note(Ok(some(1)), None), @"auto took host; cuda: 1 GPU, wanted 2 or more");
        let spread = Chosen::auto(Ok(some(1)), Crew { local_ranks: Some(1), spread: true });
        insta::assert_snapshot!(spread.note.unwrap(), @"auto took cuda: 1 GPU");
        insta::assert_snapshot!(note(Ok(some(4)), Some(8)), @"auto took host; cuda: 4 GPUs for 8 ranks; --backend cuda shares them");
        let error = Failure::failed("libcuda.so.1 is not there").with_advice("install it");
        insta::assert_snapshot!(note(Err(error), None), @"auto took host; cuda: libcuda.so.1 is not there");
    }

    #[test]
    fn ranks_take_gpus_in_turn() {
        let chosen = Chosen { backend: Backend::Cuda, seats: some(2), note: None };
        assert_eq!(chosen.ranks_default(), 2);
        let seats: Vec<_> = (0..3).map(|rank| chosen.seat(rank).unwrap().ordinal).collect();
        assert_eq!(seats, [0, 1, 0]);
        assert_eq!(Chosen::host(None).seat(0), None);
        assert_eq!(Chosen::host(None).ranks_default(), 4);
    }

    #[test]
    fn devices_are_picked_in_the_order_named() {
        let pick = |text: &str| pick(Backend::Cuda, some(4), Some(&text.parse().unwrap()));
        let ordinals = |seats: Vec<Seat>| seats.iter().map(|seat| seat.ordinal).collect::<Vec<_>>();
        assert_eq!(ordinals(pick("3, 1").unwrap()), [3, 1]);
        insta::assert_snapshot!(pick("0,4").unwrap_err(), @"
        error: --devices names GPU 4, this process sees 4
         help: they are numbered from 0; CUDA_VISIBLE_DEVICES may hide some
        ");
        assert!("".parse::<Devices>().is_err() && "0,x".parse::<Devices>().is_err());
        assert_eq!("0,2".parse::<Devices>().unwrap().to_string(), "0,2");
    }
}
