//! The caller's own pointers: what they point to, and how that can leave the process.
//!
//! A span may begin anywhere inside its allocation, so the allocation's start is looked up. Memory
//! of the vendor's plain allocator is one allocation with an IPC handle. Memory that was mapped, such
//! as the expandable segments of PyTorch, consists of several allocations one behind the other, each
//! with a handle of its own. Memory of a stream-ordered pool has neither.

use std::sync::Arc;

use super::device::{Pointee, RegionDevice, Vendor};
use super::physical::Physical;
use crate::device::{DevicePtr, Extent, Fault};

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// By the plain allocator.
    Plain,
    /// Mapped.
    Virtual,
    /// A pool, or something newer than this crate.
    Other,
}

/// The allocations that a span covers, in order; at least one.
#[derive(Debug)]
pub(super) struct Borrowed {
    pub(super) kind: Kind,
    pub(super) extents: Vec<Extent>,
}

/// A span of the caller's memory, for texts.
#[derive(Clone, Copy, Debug)]
struct Span {
    address: DevicePtr,
    bytes: u64,
}

impl Span {
    fn refuse<T>(self, why: &str) -> Result<T, Fault> {
        let Self { address, bytes } = self;
        Err(Fault::Argument(format!("cannot register {bytes} bytes at {address:#x}: {why}")))
    }
}

/// Finds out what lies at `address..address + bytes`; `bytes` is at least 1.
pub(super) fn inspect<D: RegionDevice>(
    context: &Arc<D>,
    address: DevicePtr,
    bytes: u64,
) -> Result<Borrowed, D::Error> {
    let span = Span { address, bytes };
    let Some(end) = address.checked_add(bytes) else {
        return Ok(span.refuse("the span leaves the address space")?);
    };
    check_place(&**context, span)?;
    let Some(first) = context.extent(address)? else {
        return Ok(span.refuse("the driver knows no allocation there; was it freed?")?);
    };
    let kind = kind(context, first)?;
    let mut extents = vec![first];
    let mut reached = first.end();
    while reached < end {
        let next = match kind {
            Kind::Virtual => context.extent(reached)?.filter(|next| next.address == reached),
            Kind::Plain | Kind::Other => None,
        };
        let Some(next) = next.filter(|next| next.bytes > 0) else {
            let first = first.address;
            return Ok(span.refuse(&format!(
                "the span ends at {end:#x}, and the allocation that begins at {first:#x} ends at \
                 {reached:#x}"
            ))?);
        };
        if self::kind(context, next)? != Kind::Virtual {
            let why = format!("from {reached:#x} on it is memory of another kind");
            return Ok(span.refuse(&why)?);
        }
        reached = next.end();
        extents.push(next);
    }
    Ok(Borrowed { kind, extents })
}

/// Refuses what is no memory of this device.
fn check_place<D: RegionDevice>(context: &D, span: Span) -> Result<(), D::Error> {
    let refuse = |why: &str| Ok(span.refuse(why)?);
    match context.pointee(span.address)? {
        Pointee::Device(Some(number)) if number == context.device() => Ok(()),
        Pointee::Device(Some(number)) => {
            let wanted = context.label();
            refuse(&format!("it is memory of device {number}, wanted {wanted}"))
        }
        Pointee::Device(None) => refuse("the driver does not say of which device it is"),
        Pointee::Host => refuse("it is host memory, wanted device memory"),
        Pointee::Managed => refuse(&format!(
            "it is managed memory, which moves; wanted memory of {}",
            D::Vendor::ALLOCATOR
        )),
        Pointee::Other(kind) => {
            refuse(&format!("it is memory of type {kind}, wanted device memory"))
        }
        Pointee::Unknown => refuse(
            "the driver does not know this address, wanted device memory; it is host memory, or \
             was freed",
        ),
    }
}

fn kind<D: RegionDevice>(context: &Arc<D>, extent: Extent) -> Result<Kind, D::Error> {
    if context.has_ipc_handle(extent.address)? {
        return Ok(Kind::Plain);
    }
    let physical = Physical::retain(context, extent)?;
    Ok(if physical.is_some() { Kind::Virtual } else { Kind::Other })
}
