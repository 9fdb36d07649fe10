//! What the driver knows about an address.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::call::enter;
use super::code::{CUresult, INVALID_VALUE, Outcome};
use super::context;
use super::device::ordinal;
use super::memory::pool_of;
use super::types::{CUcontext, CUdeviceptr, MEMORYTYPE_DEVICE, MEMORYTYPE_HOST};
use crate::device::machine::memory;
use crate::device::memory::{Kind, Range};
use crate::device::settings::Setting;

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(
    out: *mut c_void,
    attribute: c_int,
    address: CUdeviceptr,
) -> CUresult {
    enter("cuPointerGetAttribute", || {
        context::current()?;
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let range = memory().find(address).ok_or(INVALID_VALUE)?;
        match attribute_of(&range, attribute, address)? {
            // SAFETY: the caller gives the place of what this attribute is, here a pointer.
            Value::Word(value) => unsafe { out.cast::<u64>().write(value) },
            // SAFETY: as above, an int.
            Value::Int(value) => unsafe { out.cast::<c_uint>().write(value) },
            // SAFETY: as above, a bool.
            Value::Flag(value) => unsafe { out.cast::<u8>().write(u8::from(value)) },
        }
        Ok(())
    })
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Word(c_ulonglong),
    Int(c_uint),
    /// cuda.h says `bool` here.
    Flag(bool),
}

/// By the numbers of cuda.h.
fn attribute_of(range: &Range, attribute: c_int, address: u64) -> Outcome<Value> {
    Ok(match attribute {
        1 => Value::Word(owner(range) as u64),
        2 => Value::Int(if range.is_host() { MEMORYTYPE_HOST } else { MEMORYTYPE_DEVICE }),
        3 => Value::Word(address),
        4 if range.is_host() => Value::Word(address),
        7 => Value::Word(range.id),
        8 => Value::Flag(false),
        9 => Value::Int(place(range).map_or(u32::MAX, c_int::cast_unsigned)),
        10 => Value::Flag(matches!(range.kind, Kind::Plain { .. }) && Setting::LegacyShare.is_on()),
        11 => Value::Word(range.base),
        12 => Value::Word(range.bytes),
        13 => Value::Flag(true),
        14 => Value::Word(match range.kind {
            Kind::Mapped { .. } => u64::from(range.backing.identity().handle_kinds),
            _ => 0,
        }),
        17 => Value::Word(match range.kind {
            Kind::Pooled { .. } => pool_of(range.device()) as u64,
            _ => 0,
        }),
        _ => return Err(INVALID_VALUE),
    })
}

/// The context that allocated or opened it; a piece that was mapped belongs to none.
fn owner(range: &Range) -> CUcontext {
    match range.kind {
        Kind::Plain { .. } | Kind::Pooled { .. } => context::handle_of(range.device()),
        Kind::Imported { by, .. } => context::handle_of(by),
        Kind::Host { .. } | Kind::Registered { .. } => {
            context::current().map_or(0, |session| context::handle_of(session.device()))
        }
        Kind::Mapped { .. } => 0,
    }
}

/// The device that it is on, or that opened it where the owner's is not visible here.
fn place(range: &Range) -> Option<c_int> {
    match range.kind {
        Kind::Imported { by, .. } => ordinal(range.device()).or_else(|| ordinal(by)),
        Kind::Host { .. } | Kind::Registered { .. } => ordinal(context::current().ok()?.device()),
        _ => ordinal(range.device()),
    }
}
