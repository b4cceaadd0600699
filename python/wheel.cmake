# The files of the Python package beside its sources: the install component "python". core/program_files.h looks
# for data beside the library.
add_custom_target(python_package)  # builds them
if(TANDEM_PREBUILT)
  set(program ${TANDEM_PREBUILT}/tandem)
  set(library ${TANDEM_PREBUILT}/libtandem.so.${PROJECT_VERSION})
else()
  set(program $<TARGET_FILE:tandem>)
  set(library $<TARGET_FILE:tandem_library>)
  add_dependencies(python_package tandem tandem_library)
endif()
set(in_package DESTINATION tandem COMPONENT python EXCLUDE_FROM_ALL)
install(PROGRAMS ${program} ${in_package})
install(FILES ${library} RENAME libtandem.so ${in_package})
install(DIRECTORY machines ${in_package} FILES_MATCHING PATTERN *.json)
install(DIRECTORY models/configs models/tiny-r1 DESTINATION tandem/models COMPONENT python EXCLUDE_FROM_ALL)
