//! Checks whether a measurement fits into the available host memory.

use peerlane_toolkit::limits::AvailableMemory;

use crate::error::{Failure, Result};
use crate::units::Size;

/// The memory in bytes that a process needs in addition to its buffers.
const PROCESS_BYTES: u64 = 8 << 20;

/// The host memory that a measurement allocates on this machine at its largest size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMemory {
    pub(crate) ranks: u64,
    pub(crate) total_bytes: u64,
    /// The size of one rank's input in bytes, or 0 for an operation in place.
    pub(crate) input_bytes: u64,
    /// The size of the memory for the contributions to one rank's sum in bytes.
    pub(crate) inbox_bytes: u64,
}

impl HostMemory {
    /// Fails if the measurement needs more than the available memory; `None` is not checked.
    pub(crate) fn check(&self, available: Option<AvailableMemory>) -> Result<()> {
        let Some(available) = available.filter(|available| self.bytes() > available.bytes) else {
            return Ok(());
        };
        let Self { ranks, total_bytes, input_bytes, inbox_bytes } = *self;
        let plural = if ranks == 1 { "" } else { "s" };
        let inbox = match inbox_bytes {
            0 => String::new(),
            bytes => format!(", and contributions of {}", Size(bytes)),
        };
        let failure = Failure::failed(format!(
            "the largest size needs {} of memory ({ranks} rank{plural}, each with an output of {} \
             and an input of {}{inbox}), but only {available}",
            Size(self.bytes()),
            Size(total_bytes),
            Size(input_bytes)
        ));
        // The input is at most as long as the output, so half of the remaining memory always fits.
        let fits = (available.bytes / ranks.max(1)).saturating_sub(PROCESS_BYTES) / 2;
        Err(failure.with_advice(match fits.checked_ilog2() {
            Some(power) => {
                format!("lower --max-bytes, for instance to {}, or lower --ranks", Size(1 << power))
            }
            None => "lower --ranks".to_owned(),
        }))
    }

    fn bytes(&self) -> u64 {
        let buffers = self.total_bytes.saturating_add(self.input_bytes);
        let rank = buffers.saturating_add(self.inbox_bytes).saturating_add(PROCESS_BYTES);
        rank.saturating_mul(self.ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEED: HostMemory =
        HostMemory { ranks: 4, total_bytes: 64 << 20, input_bytes: 16 << 20, inbox_bytes: 0 };

    fn on_machine(bytes: u64) -> AvailableMemory {
        AvailableMemory::of_machine(bytes)
    }

    #[test]
    fn enough_memory_passes() {
        assert_eq!(NEED.check(Some(on_machine(4 * (88 << 20)))), Ok(()));
        assert_eq!(NEED.check(None), Ok(()));
    }

    #[test]
    fn too_little_memory_is_refused_with_both_sizes() {
        insta::assert_snapshot!(NEED.check(Some(on_machine(200 << 20))).unwrap_err(), @"
        error: the largest size needs 352 MiB of memory (4 ranks, each with an output of 64 MiB and an input of 16 MiB), but only 209715200 bytes are available on this machine
         help: lower --max-bytes, for instance to 16 MiB, or lower --ranks
        ");
        let endless =
            HostMemory { inbox_bytes: 0, ranks: 2, total_bytes: u64::MAX, input_bytes: 0 };
        insta::assert_snapshot!(endless.check(Some(on_machine(0))).unwrap_err(), @"
        error: the largest size needs 16.00 EiB of memory (2 ranks, each with an output of 16.00 EiB and an input of 0 B), but only 0 bytes are available on this machine
         help: lower --ranks
        ");
    }
}
