//! Implements the attributes of addresses.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::Api;
use super::code::{INVALID_VALUE, Outcome};
use super::memory::pool_of;
use super::primary;
use crate::device::machine::memory;
use crate::device::memory::{Kind, Range};
use crate::device::settings::Setting;

/// Numbers of the kinds of memory.
pub(crate) const HOST: c_uint = 1;
pub(crate) const DEVICE: c_uint = 2;

pub(crate) fn attribute<A: Api>(out: *mut c_void, attribute: c_int, address: u64) -> Outcome {
    A::ready()?;
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    match attribute_of::<A>(&range, attribute, address)? {
        // SAFETY: the caller gives the place of what this attribute is, here a pointer.
        Value::Word(value) => unsafe { out.cast::<u64>().write(value) },
        // SAFETY: as above, an int.
        Value::Int(value) => unsafe { out.cast::<c_uint>().write(value) },
        // SAFETY: as above, a bool.
        Value::Flag(value) => unsafe { out.cast::<u8>().write(u8::from(value)) },
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Word(c_ulonglong),
    Int(c_uint),
    /// The vendors use `bool` for this attribute.
    Flag(bool),
}

/// Returns an attribute of an address by its number, which both vendors share.
fn attribute_of<A: Api>(range: &Range, attribute: c_int, address: u64) -> Outcome<Value> {
    Ok(match attribute {
        1 => Value::Word(owner::<A>(range) as u64),
        2 => Value::Int(kind(range)),
        3 => Value::Word(address),
        4 if range.is_host() => Value::Word(address),
        7 => Value::Word(range.id),
        8 => Value::Flag(false),
        9 => Value::Int(place::<A>(range).map_or(u32::MAX, c_int::cast_unsigned)),
        10 => {
            Value::Flag(matches!(range.kind, Kind::Plain { .. }) && !Setting::LegacyShare.is("off"))
        }
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

pub(crate) fn kind(range: &Range) -> c_uint {
    if range.is_host() { HOST } else { DEVICE }
}

/// Returns the context that allocated or opened the memory. A mapping belongs to no context.
fn owner<A: Api>(range: &Range) -> usize {
    match range.kind {
        Kind::Plain { .. } | Kind::Pooled { .. } => primary::handle_of(range.device()),
        Kind::Imported { by, .. } => primary::handle_of(by),
        Kind::Host { .. } | Kind::Signal { .. } | Kind::Registered { .. } => {
            A::current().map_or(0, |session| primary::handle_of(session.device()))
        }
        Kind::Mapped { .. } => 0,
    }
}

/// Returns the device that holds the memory, or the one that opened it if the owner's is not
/// visible here.
pub(crate) fn place<A: Api>(range: &Range) -> Option<c_int> {
    match range.kind {
        Kind::Imported { by, .. } => A::ordinal(range.device()).or_else(|| A::ordinal(by)),
        Kind::Host { .. } | Kind::Signal { .. } | Kind::Registered { .. } => {
            A::ordinal(A::current().ok()?.device())
        }
        _ => A::ordinal(range.device()),
    }
}
