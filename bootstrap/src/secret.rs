//! Defines the secret of a job, by which ranks and the hub prove that they belong to the job.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use hmac_sha256::HMAC;
use peerlane_hal::ErrorKind;
use peerlane_toolkit::limits::SystemError;
use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::Error;

const SECRET_BYTES_MIN: usize = 16;

const SECRET_BYTES_MAX: usize = 4096;

/// Holds the secret of a job, a text that only the processes of the job know.
///
/// It is not printed: its `Debug` output has no content, and no error contains it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Creates a secret from `text`, after removing the white space at its ends.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the text has fewer than 16 or more than
    /// 4096 bytes, or contains U+FFFD, which stands for bytes that are not UTF-8.
    pub fn new(text: &str) -> Result<Self, Error> {
        Self::from_source("the secret", text)
    }

    /// Creates a secret of 32 random bytes, in hexadecimal digits.
    ///
    /// # Errors
    /// [`Other`](ErrorKind::Other) if the system has no random bytes.
    pub fn random() -> Result<Self, Error> {
        Ok(Self(random_bytes()?.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Reads a secret from a file that only its owner can access.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the file cannot be read, if its group or
    /// others can access it, or if its text is no secret.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        Self::read_source(&format!("the secret in the file {}", path.display()), path)
    }

    /// Returns the text of the secret, which a launcher passes to its ranks as `PEERLANE_SECRET`.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Creates a secret from `text`, with errors that begin with `source`, the origin of the text.
    pub(super) fn from_source(source: &str, text: &str) -> Result<Self, Error> {
        let text = text.trim();

        // `from_env` has replaced bytes that are not UTF-8 by this character.
        if text.contains(char::REPLACEMENT_CHARACTER) {
            return Err(invalid(format!("{source} is not UTF-8")));
        }

        if !(SECRET_BYTES_MIN..=SECRET_BYTES_MAX).contains(&text.len()) {
            return Err(invalid(format!(
                "{source} has {} bytes, expected {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}; create one with `openssl rand \
                 -hex 32`",
                text.len()
            )));
        }

        Ok(Self(text.to_owned()))
    }

    /// Reads a secret from the file `path`, with errors that begin with `source`.
    pub(super) fn read_source(source: &str, path: &Path) -> Result<Self, Error> {
        let failed = |error| cannot_read(source, &error);

        // The open of a named pipe would wait for a writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(invalid(format!("{source} is not in a regular file")));
        }

        // The mode is that of the open file, which nobody can replace before it is read.
        let file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(invalid(format!(
                "{source} can be accessed by other users (mode {mode:04o}), expected mode 0600; run `chmod 600 {}`",
                path.display()
            )));
        }

        // One byte beyond the limit is enough to see that the text is too long.
        let mut text = String::new();
        file.take(SECRET_BYTES_MAX as u64 + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() > SECRET_BYTES_MAX {
            return Err(invalid(format!("{source} has more than {SECRET_BYTES_MAX} bytes")));
        }

        Self::from_source(source, &text)
    }

    /// Computes the HMAC of `parts` with the secret as key, which proves knowledge of the secret.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> HMAC {
        let mut mac = HMAC::new(self.0.as_bytes());
        for part in parts {
            // With the lengths, other parts that are equal when joined have another HMAC.
            mac.update((part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(super) fn random_bytes() -> Result<[u8; 32], Error> {
    let mut bytes = [0; 32];
    // The kernel fills up to 256 bytes at once, but may wait for them soon after the boot.
    retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty())).map_err(|error| {
        Error::new(ErrorKind::Other, format!("cannot get random bytes from the system: {error}"))
    })?;
    Ok(bytes)
}

/// Returns the error for a secret file that cannot be read.
///
/// The error has another kind if the system has reached a limit.
fn cannot_read(source: &str, error: &io::Error) -> Error {
    let system = SystemError::of_io(format!("{source} cannot be read"), error);

    match system.is_exhausted() {
        true => system.into(),
        false => invalid(format!("{source} cannot be read: {error}")),
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_secret_is_long_and_never_printed() {
        let secret = Secret::random().unwrap();
        assert_eq!(secret.expose().len(), 64);
        assert_ne!(secret, Secret::random().unwrap());
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn the_code_is_hmac_sha_256_of_all_parts_with_their_lengths() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let code = |parts: &[&[u8]]| secret.mac(parts).finalize();
        // Computed with Python's `hmac`.
        let expected = "031768b810bc2ead8afd2dfc461166e1f349fd7629f0f257b701cd1223050d77";
        let digits: String =
            code(&[b"ab", b"c"]).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, expected);
        assert_ne!(code(&[b"ab", b"c"]), code(&[b"a", b"bc"]));
    }
}
