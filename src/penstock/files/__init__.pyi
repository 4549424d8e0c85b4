from penstock.files.stores.options import StoreOptions as StoreOptions
