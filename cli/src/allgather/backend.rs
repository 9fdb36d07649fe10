//! Selects the backend of a run, the GPU of each rank and the kind of copy engine.

use peerlane::open::{self, Backend, Survey};

use super::options::Options;
use super::target::TargetOptions;
use crate::error::{Failure, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuSlot {
    pub(crate) ordinal: u32,
    /// The PCI address of the GPU, such as `0000:1b:00.0`.
    pub(crate) pci_bus_id: String,
    pub(crate) product: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Selected {
    pub(crate) backend: Backend,
    /// The GPUs that the ranks of this machine use in turn; empty for backends without GPUs.
    pub(crate) slots: Vec<GpuSlot>,
    pub(crate) note: Option<String>,
}

impl Selected {
    /// Selects the backend for `local_ranks` ranks on this machine, or for as many as there are
    /// GPUs.
    pub(crate) fn of_options(options: &Options, local_ranks: Option<usize>) -> Result<Self> {
        // Options that do not fit are reported before a driver that is missing.
        match options.target.backend.0 {
            Some(Backend::Rocm) => options.check_without_cuda()?,
            Some(backend) if backend.is_network() => options.nics.check(backend)?,
            _ => {}
        }
        let selected = Self::of_target(&options.target, local_ranks)?;

        if selected.backend == Backend::Rocm {
            options.check_without_cuda()?;
        }

        if selected.slots.is_empty() {
            options.check_without_gpus(selected.name())?;
        }

        Ok(selected)
    }

    /// Selects the backend without a look at the options that need one of them.
    pub(crate) fn of_target(target: &TargetOptions, local_ranks: Option<usize>) -> Result<Self> {
        match target.backend.0 {
            None => Self::auto(Survey::of_gpus(), target, local_ranks),
            Some(backend @ (Backend::Cuda | Backend::Rocm)) => {
                Ok(Self { backend, slots: slots(backend, &target.devices)?, note: None })
            }
            Some(backend) => Ok(Self { backend, slots: Vec::new(), note: None }),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.backend.name()
    }

    /// Selects a GPU backend if every rank can have a GPU of its own, and the host backend
    /// otherwise. A driver that does not work is an error.
    fn auto(survey: Survey, target: &TargetOptions, local_ranks: Option<usize>) -> Result<Self> {
        let requested = &target.devices;
        let count = (!requested.is_empty()).then_some(requested.len());
        let (backend, reasons) = survey.choose_local(local_ranks.or(count)).map_err(|error| {
            Failure::from(error)
                .with_advice("repair the driver, or use host memory with --backend host")
        })?;
        let (backend, devices) = match backend {
            Backend::Cuda => (backend, survey.cuda),
            Backend::Rocm => (backend, survey.rocm),
            _ => return Ok(Self::host(Some(reasons.join("; ")))),
        };
        let note = Some(format!("auto selected {}: {}", backend.name(), reasons.join("; ")));
        let slots = pick(backend, slots_of(devices.unwrap_or_default()), requested)?;
        Ok(Self { backend, slots, note })
    }

    fn host(why_no_gpus: Option<String>) -> Self {
        let note = why_no_gpus.map(|why| format!("auto selected host; {why}"));
        Self { backend: Backend::Host, slots: Vec::new(), note }
    }

    pub(crate) fn ranks_default(&self) -> usize {
        if self.slots.is_empty() { Options::RANKS_DEFAULT } else { self.slots.len() }
    }

    /// Returns the GPU of the rank with this index on this machine; `None` without GPUs.
    pub(crate) fn slot(&self, local_rank: usize) -> Option<&GpuSlot> {
        self.slots.get(local_rank.checked_rem(self.slots.len())?)
    }
}

fn slots(backend: Backend, requested: &[u32]) -> Result<Vec<GpuSlot>> {
    let missing = |text: String| {
        Failure::failed(text)
            .with_advice("run `peerlane doctor` to see the backends and devices of this machine")
    };
    let survey = Survey::of_gpus();
    let devices = if backend == Backend::Rocm { survey.rocm } else { survey.cuda };
    let devices = devices.map_err(|reason| missing(reason.to_string()))?;
    pick(backend, slots_of(devices), requested)
}

fn slots_of(devices: Vec<open::Device>) -> Vec<GpuSlot> {
    let slot = |device: open::Device| GpuSlot {
        ordinal: device.ordinal,
        product: device.product.unwrap_or_default(),
        pci_bus_id: device.name,
    };
    devices.into_iter().map(slot).collect()
}

fn pick(backend: Backend, slots: Vec<GpuSlot>, requested: &[u32]) -> Result<Vec<GpuSlot>> {
    if requested.is_empty() {
        if slots.is_empty() {
            return Err(Failure::failed(format!(
                "the backend {} found no GPU on this machine",
                backend.name()
            ))
            .with_advice("run `peerlane doctor` to see the backends and devices of this machine"));
        }
        return Ok(slots);
    }

    let find = |ordinal: &u32| {
        slots.iter().find(|slot| slot.ordinal == *ordinal).cloned().ok_or_else(|| {
            let count = slots.len();
            Failure::usage(format!(
                "--devices names GPU {ordinal}, but this process sees {count} GPUs"
            ))
            .with_advice(match backend {
                Backend::Rocm => "give numbers from 0; HIP_VISIBLE_DEVICES may hide some GPUs",
                _ => "give numbers from 0; CUDA_VISIBLE_DEVICES may hide some GPUs",
            })
        })
    };

    requested.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use peerlane::open::NoGpus;

    use super::super::options::tests::parse;
    use super::*;

    fn some(count: u32) -> Vec<GpuSlot> {
        let slot = |ordinal| GpuSlot {
            ordinal,
            pci_bus_id: format!("0000:{ordinal:02x}:00.0"),
            product: "a GPU".to_owned(),
        };
        (0..count).map(slot).collect()
    }

    #[test]
    fn auto_selects_gpus_and_gives_a_reason() {
        let selected = |line: &str, cuda, local_ranks| {
            let mut survey = Survey::of_gpus();
            survey.cuda = cuda;
            survey.rocm = Err(NoGpus::Absent("libamdhip64.so is not there".to_owned()));
            Selected::auto(survey, &parse(line).unwrap().target, local_ranks)
        };
        let gpus = |count: u32| {
            // The type cannot be constructed outside of the library.
            let mut devices = Vec::new();
            devices.extend((0..count).map(|ordinal| open::Device::new(ordinal, "0000:01:00.0")));
            Ok(devices)
        };
        let both = selected("", gpus(2), Some(2)).unwrap();
        insta::assert_snapshot!(both.note.unwrap(), @"auto selected cuda: 2 GPUs");
        assert_eq!(both.slots.len(), 2);
        let some = selected("--devices 3,1", gpus(4), None).unwrap();
        assert_eq!(some.slots.iter().map(|slot| slot.ordinal).collect::<Vec<_>>(), [3, 1]);
        let missing = NoGpus::Absent("libcuda.so.1 is not there".to_owned());
        let missing = selected("", Err(missing), None).unwrap();
        insta::assert_snapshot!(missing.note.unwrap(), @"auto selected host; cuda: libcuda.so.1 is not there; rocm: libamdhip64.so is not there");
        let broken = NoGpus::Broken("cuInit failed".to_owned());
        insta::assert_snapshot!(selected("", Err(broken), None).unwrap_err(), @"
        error: the driver of the backend cuda does not work: cuInit failed
         help: repair the driver, or use host memory with --backend host
        ");
    }

    #[test]
    fn ranks_take_gpus_in_turn() {
        let selected = Selected { backend: Backend::Cuda, slots: some(2), note: None };
        assert_eq!(selected.ranks_default(), 2);
        let slots: Vec<_> = (0..3).map(|rank| selected.slot(rank).unwrap().ordinal).collect();
        assert_eq!(slots, [0, 1, 0]);
        assert_eq!(Selected::host(None).slot(0), None);
        assert_eq!(Selected::host(None).ranks_default(), 4);
    }

    #[test]
    fn devices_are_picked_in_the_order_named() {
        let pick = |devices: &[u32]| pick(Backend::Cuda, some(4), devices);
        let ordinals =
            |slots: Vec<GpuSlot>| slots.iter().map(|slot| slot.ordinal).collect::<Vec<_>>();
        assert_eq!(ordinals(pick(&[3, 1]).unwrap()), [3, 1]);
        insta::assert_snapshot!(pick(&[0, 4]).unwrap_err(), @"
        error: --devices names GPU 4, but this process sees 4 GPUs
         help: give numbers from 0; CUDA_VISIBLE_DEVICES may hide some GPUs
        ");
        assert_eq!(parse("--devices 0,2").unwrap().target.devices, [0, 2]);
        for wrong in ["--devices=", "--devices 0,x"] {
            assert!(parse(wrong).unwrap_err().contains("such as 0,1,3"), "{wrong}");
        }
    }
}
