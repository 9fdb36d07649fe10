//! The caller's own pointers: what they point to, and how that can leave the process.
//!
//! A span may begin anywhere inside its allocation, so the allocation's start is looked up. Memory
//! of `cudaMalloc` is one allocation with a legacy IPC handle. Memory that was mapped, such as the
//! expandable segments of PyTorch, consists of several allocations one behind the other, each with a
//! handle of its own. Memory of a stream-ordered pool has neither.

use std::ffi::c_int;
use std::sync::Arc;

use super::handle::Handle;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr};

/// One allocation of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) address: CUdeviceptr,
    pub(super) bytes: u64,
}

impl Extent {
    fn end(self) -> u64 {
        self.address + self.bytes
    }
}

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `cudaMalloc`.
    Legacy,
    /// `cuMemMap`.
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
    address: CUdeviceptr,
    bytes: u64,
}

impl Span {
    fn refuse<T>(self, why: &str) -> Result<T, Error> {
        let Self { address, bytes } = self;
        Err(Error::Argument(format!("cannot register {bytes} bytes at {address:#x}: {why}")))
    }
}

/// Finds out what lies at `address..address + bytes`; `bytes` is at least 1.
pub(super) fn inspect(
    context: &Arc<Context>,
    address: CUdeviceptr,
    bytes: u64,
) -> Result<Borrowed, Error> {
    let span = Span { address, bytes };
    let Some(end) = address.checked_add(bytes) else {
        return span.refuse("the span leaves the address space");
    };
    check_place(context, span)?;
    let first = extent(context, address)?;
    let Some(first) = first else {
        return span.refuse("the driver knows no allocation there; was it freed?");
    };
    let kind = kind(context, first)?;
    let mut extents = vec![first];
    let mut reached = first.end();
    while reached < end {
        let next = match kind {
            Kind::Virtual => extent(context, reached)?.filter(|next| next.address == reached),
            Kind::Legacy | Kind::Other => None,
        };
        let Some(next) = next.filter(|next| next.bytes > 0) else {
            let first = first.address;
            return span.refuse(&format!(
                "the span ends at {end:#x}, and the allocation that begins at {first:#x} ends at \
                 {reached:#x}"
            ));
        };
        if self::kind(context, next)? != Kind::Virtual {
            return span.refuse(&format!("from {reached:#x} on it is memory of another kind"));
        }
        reached = next.end();
        extents.push(next);
    }
    Ok(Borrowed { kind, extents })
}

/// Refuses what is no memory of this device.
fn check_place(context: &Context, span: Span) -> Result<(), Error> {
    let attribute = |number| attribute(context, number, span.address);
    match attribute(sys::POINTER_ATTRIBUTE_MEMORY_TYPE)? {
        Some(kind) if kind == u64::from(sys::MEMORYTYPE_DEVICE) => {}
        Some(kind) if kind == u64::from(sys::MEMORYTYPE_HOST) => {
            return span.refuse("it is host memory, wanted device memory");
        }
        Some(kind) => {
            return span.refuse(&format!("it is memory of type {kind}, wanted device memory"));
        }
        None => {
            return span.refuse(
                "the driver does not know this address, wanted device memory; it is host memory, or \
                 was freed",
            );
        }
    }
    if attribute(sys::POINTER_ATTRIBUTE_IS_MANAGED)?.is_some_and(|managed| managed != 0) {
        return span.refuse("it is managed memory, which moves; wanted memory of cudaMalloc");
    }
    let ordinal = attribute(sys::POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
    match ordinal.map(|ordinal| ordinal as u32 as c_int) {
        Some(ordinal) if ordinal == context.device => Ok(()),
        Some(ordinal) => {
            let wanted = context.label();
            span.refuse(&format!("it is memory of device {ordinal}, wanted {wanted}"))
        }
        None => span.refuse("the driver does not say of which device it is"),
    }
}

fn kind(context: &Arc<Context>, extent: Extent) -> Result<Kind, Error> {
    let legacy = sys::POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    if attribute(context, legacy, extent.address)?.is_some_and(|capable| capable != 0) {
        return Ok(Kind::Legacy);
    }
    let handle = Handle::retain(context, extent.address, extent.bytes)?;
    Ok(if handle.is_some() { Kind::Virtual } else { Kind::Other })
}

/// The allocation that holds `address`; for mapped memory, the one mapping.
pub(super) fn extent(context: &Context, address: CUdeviceptr) -> Result<Option<Extent>, Error> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver looks the address up; the results are stored in locals.
    let code =
        unsafe { (context.driver.mem_get_address_range)(&raw mut base, &raw mut bytes, address) };
    if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_FOUND) {
        return Ok(None);
    }
    context.check("cuMemGetAddressRange_v2", code)?;
    Ok(Some(Extent { address: base, bytes: bytes as u64 }))
}

/// Whose memory the driver takes it for; `None` where it does not know the address.
pub(super) fn memory_type(context: &Context, address: CUdeviceptr) -> Result<Option<u64>, Error> {
    attribute(context, sys::POINTER_ATTRIBUTE_MEMORY_TYPE, address)
}

/// An attribute of a pointer; `None` where the driver does not know the pointer, or the attribute.
fn attribute(context: &Context, number: c_int, address: CUdeviceptr) -> Result<Option<u64>, Error> {
    // The attributes have between 1 and 8 bytes; the rest stays zero.
    let mut value = 0_u64;
    // SAFETY: no attribute that is asked for here is larger than the local.
    let code =
        unsafe { (context.driver.pointer_get_attribute)((&raw mut value).cast(), number, address) };
    if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_SUPPORTED) {
        return Ok(None);
    }
    context.check("cuPointerGetAttribute", code)?;
    Ok(Some(value))
}
