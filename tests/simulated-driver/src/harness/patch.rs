//! Takes symbols away from a shared library, so that it looks like an older one, and gives it
//! settings of its own.
//!
//! The first letter of the name in the table of names is changed. The hash of the old name still
//! leads to the entry, whose name then does not match, so looking it up fails as if it had never
//! been there.

use crate::device::settings::{OWN_BYTES, OWN_MARK};

/// What the first letter becomes.
const OTHER: u8 = b'_';

/// Hides one symbol.
///
/// # Errors
/// Says why the library has none of this name.
pub(super) fn hide(library: &mut [u8], symbol: &str) -> Result<(), String> {
    let (start, length) = names(library).ok_or("it is no shared library of 64 bits")?;
    let table = &library[start..start + length];
    let wanted = [&[0], symbol.as_bytes(), &[0]].concat();
    let found = table.windows(wanted.len()).position(|window| window == wanted);
    let at = found.ok_or_else(|| format!("it has no symbol {symbol}"))?;
    library[start + at + 1] = OTHER;
    Ok(())
}

/// Writes settings behind the library's mark for them.
///
/// # Errors
/// Says that there is no room.
pub(super) fn own(library: &mut [u8], settings: &str) -> Result<(), String> {
    let room = OWN_BYTES - OWN_MARK.len();
    if settings.len() >= room {
        return Err(format!("there is room for settings of {room} bytes, not for {settings}"));
    }
    let wanted = [&OWN_MARK[..], &vec![0; room]].concat();
    let found = library.windows(wanted.len()).position(|window| window == wanted);
    let at = found.ok_or("it has no mark for settings")? + OWN_MARK.len();
    library[at..at + settings.len()].copy_from_slice(settings.as_bytes());
    Ok(())
}

/// Where the names of dynamic symbols are, and how many bytes they take: the string table that
/// the section of dynamic symbols links to.
fn names(library: &[u8]) -> Option<(usize, usize)> {
    const DYNAMIC_SYMBOLS: u32 = 11;
    if library.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let sections = word(library, 0x28)?;
    let (size, count) = (half(library, 0x3a)?, half(library, 0x3c)?);
    let section = |index: usize| sections.checked_add(index * size);
    let symbols = (0..count)
        .filter_map(section)
        .find(|at| library.get(at + 4..at + 8) == Some(&DYNAMIC_SYMBOLS.to_le_bytes()[..]))?;
    let link = u32::from_le_bytes(library.get(symbols + 0x28..symbols + 0x2c)?.try_into().ok()?);
    let strings = section(link as usize)?;
    let (start, length) = (word(library, strings + 0x18)?, word(library, strings + 0x20)?);
    (start.checked_add(length)? <= library.len()).then_some((start, length))
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let word = u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?);
    usize::try_from(word).ok()
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?).into())
}
