//! Runs reductions, as the kernels of Peerlane do on a device, with the arithmetic of the processor.

use std::sync::Arc;

use peerlane_hal::{DType, ElementKind, Operator, Reduction};

use super::counters::Counter;
use super::fault::Fault;
use super::memory::AddressSpace;
use super::session::Session;

#[derive(Clone, Debug)]
pub(crate) struct Reduce {
    pub(crate) target: u64,
    pub(crate) sources: Arc<[u64]>,
    pub(crate) bytes: u64,
    pub(crate) reduction: Reduction,
}

impl Reduce {
    /// Returns the reduction that a kernel does with these arguments: `name` is that of the kernel behind its prefix, such
    /// as `max_u8`.
    pub(crate) fn reduction(
        name: &str,
        flip: u64,
        divisor: u32,
        sources: usize,
    ) -> Option<Reduction> {
        let (operator, dtype) = name.split_once('_')?;
        let dtype: DType = dtype.parse().ok()?;
        let bits = 8 * dtype.bytes();
        let word = flip & (u64::MAX >> (64 - bits));
        let repeated =
            (0..64 / bits).all(|at| flip >> (at * bits) & (u64::MAX >> (64 - bits)) == word);
        let sign = 1 << (bits - 1);
        let is_signed =
            |other: &DType| other.kind() == ElementKind::Signed && other.bytes() == dtype.bytes();
        let is_unsigned = dtype.kind() == ElementKind::Unsigned;
        let signed = DType::ALL.into_iter().find(|other| is_unsigned && is_signed(other));
        let (operator, dtype) = match (operator, signed) {
            ("sum", _) if flip == 0 && divisor == 1 => (Operator::Sum, dtype),
            ("sum", None) if flip == 0 && divisor as usize == sources => (Operator::Average, dtype),
            ("max", _) if flip == 0 => (Operator::Max, dtype),
            ("max", None) if word == sign => (Operator::Min, dtype),
            ("maximum", None) if !is_unsigned && flip == 0 => (Operator::Maximum, dtype),
            ("maximum", None) if !is_unsigned && word == sign => (Operator::Minimum, dtype),
            ("max", Some(signed)) if word == sign => (Operator::Max, signed),
            ("max", Some(signed)) if word == sign - 1 => (Operator::Min, signed),
            ("max", Some(_)) if word == sign | (sign - 1) => (Operator::Min, dtype),
            _ => return None,
        };
        Reduction::new(operator, dtype).ok().filter(|_| repeated)
    }

    pub(crate) fn run(&self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let places = self.sources.iter().chain([&self.target]);
        let pinned: Result<Vec<_>, Fault> =
            places.map(|place| memory.pin(*place, self.bytes, session)).collect();
        let _pinned = pinned?;
        let sources: Vec<_> = self.sources.iter().map(|source| *source as *const u8).collect();
        // SAFETY: the spans are pinned, and aligned as `launch` has checked. As on a device, the caller ensures that they are not
        // used meanwhile.
        unsafe { self.reduction.run(self.target as *mut u8, &sources, self.bytes as usize) };
        Counter::Reductions.add(session.device(), 1);
        Ok(())
    }
}
