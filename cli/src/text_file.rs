//! Reads the text files that command line options name.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use crate::error::{Failure, Result};
use crate::units::Size;

/// The maximum length of a text file in bytes.
const TEXT_BYTES_MAX: u64 = 256 << 20;

pub(crate) fn read(path: &Path) -> Result<String> {
    let what = path.display();
    let failed = |error: io::Error| Failure::io(format_args!("cannot read {what}"), &error);
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(TEXT_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if read as u64 > TEXT_BYTES_MAX {
        let max = Size(TEXT_BYTES_MAX);
        return Err(Failure::usage(format!(
            "{what} has more than {max}, expected a text file that `peerlane` wrote"
        )));
    }
    Ok(text)
}
