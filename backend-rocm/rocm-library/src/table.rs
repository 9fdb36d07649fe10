//! Tables of functions.

/// A function of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// As the library exports it.
    pub name: &'static str,
    /// The first release of ROCm that has it; `None` if every supported one has.
    pub since: Option<&'static str>,
}

/// Declares `Library`, a table of functions of a library of ROCm, loaded once for the process.
///
/// A function's type is of the same name as the function, and in scope.
#[macro_export]
macro_rules! table {
    (
        $(#[$attribute:meta])*
        pub struct Library($wanted:expr);
        required { $($need:ident = $need_symbol:ident;)* }
        optional { $($may:ident = $may_symbol:ident since $since:literal;)* }
    ) => {
        $(#[$attribute])*
        pub struct Library {
            $(
                #[doc = concat!("`", stringify!($need_symbol), "`")]
                pub $need: $need_symbol,
            )*
            $(
                #[doc = concat!("`", stringify!($may_symbol), "`, from ROCm ", $since, " on")]
                pub $may: Option<$may_symbol>,
            )*
            opened: $crate::Opened,
        }

        impl Library {
            /// All functions of the table.
            pub const SYMBOLS: &[$crate::Symbol] = &[
                $($crate::Symbol { name: stringify!($need_symbol), since: None },)*
                $($crate::Symbol { name: stringify!($may_symbol), since: Some($since) },)*
            ];

            /// The library, loaded once for the process.
            ///
            /// # Errors
            /// It is not there, or too old; the same answer at every call.
            pub fn load() -> Result<&'static Self, $crate::LoadError> {
                static LOADED: std::sync::OnceLock<Result<Library, $crate::LoadError>> =
                    std::sync::OnceLock::new();
                let load = || $wanted.open().and_then(Self::look_up);
                LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
            }

            /// A library of another name or path.
            ///
            /// # Errors
            /// It is not there, or lacks a required function.
            pub fn load_from(
                path: impl AsRef<std::path::Path>,
            ) -> Result<Self, $crate::LoadError> {
                $wanted.open_from(path).and_then(Self::look_up)
            }

            /// The file that the functions come from, its links followed.
            pub fn file(&self) -> &std::path::Path {
                self.opened.file()
            }

            /// Whether the library has this function of the table.
            pub fn has(&self, symbol: &str) -> bool {
                match symbol {
                    $(stringify!($need_symbol) => true,)*
                    $(stringify!($may_symbol) => self.$may.is_some(),)*
                    _ => false,
                }
            }

            /// What to say where an optional function is needed and missing.
            pub fn lacks(&self, symbol: &str) -> $crate::LoadError {
                let found = Self::SYMBOLS.iter().find(|it| it.name == symbol);
                let known = found.copied().unwrap_or($crate::Symbol {
                    name: "a function that is in no table",
                    since: None,
                });
                $crate::LoadError::Symbol {
                    file: self.file().to_owned(),
                    symbol: known.name,
                    since: known.since.unwrap_or($wanted.oldest),
                }
            }

            fn look_up(opened: $crate::Opened) -> Result<Self, $crate::LoadError> {
                let oldest = $wanted.oldest;
                $(
                    // SAFETY: the type is the header's declaration of this function.
                    let $need: $need_symbol =
                        unsafe { opened.symbol(stringify!($need_symbol), oldest) }?;
                )*
                $(
                    // SAFETY: as above.
                    let $may: Option<$may_symbol> =
                        unsafe { opened.symbol(stringify!($may_symbol), $since) }.ok();
                )*
                Ok(Self { $($need,)* $($may,)* opened })
            }
        }

        impl std::fmt::Debug for Library {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct("Library").field("file", &self.file()).finish_non_exhaustive()
            }
        }
    };
}
